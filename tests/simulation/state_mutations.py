"""Mutations that need recurrent layers; see ``mutations.py``."""

from __future__ import annotations

from tests.simulation.mutations import Patch, by_name
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.scheduling.states import StatePool


def prefixes_are_shared_without_a_state(patch: Patch) -> None:
    patch.setattr(StatePool, "usable", lambda self, match: match)


def failed_step_overwrites_the_states_it_reads(patch: Patch) -> None:
    """It cannot be repeated."""
    real = StatePool.advance

    def advance(self: StatePool, sequence: Sequence) -> None:
        real(self, sequence)
        if (rows := sequence.state_rows) is not None:
            self._drop(rows.next)
            rows.next = rows.current
            self._refs[rows.current] += 1

    patch.setattr(StatePool, "advance", advance)
    patch.setattr(StatePool, "check", lambda *_: None)


def snapshots_are_those_of_the_page_before(patch: Patch) -> None:
    real = StatePool._keep

    def keep(self: StatePool, node: object, row: int, rows: object) -> None:
        real(self, getattr(node, "parent", None) or node, row, rows)  # type: ignore[arg-type]

    patch.setattr(StatePool, "_keep", keep)


def preempted_sequences_keep_their_rows(patch: Patch) -> None:
    def leave(self: StatePool, sequence: Sequence) -> None:
        sequence.state_rows = None

    patch.setattr(StatePool, "leave", leave)


STATE_MUTATIONS = by_name(
    prefixes_are_shared_without_a_state,
    failed_step_overwrites_the_states_it_reads,
    snapshots_are_those_of_the_page_before,
    preempted_sequences_keep_their_rows,
)
