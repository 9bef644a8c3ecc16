"""Mutations that need failures of the power; see ``mutations.py``."""

from __future__ import annotations

from tests.simulation.mutations import Patch, by_name
from triptych.protocol.journal import salvage
from triptych.workers.process import WorkerContext


def accepted_requests_are_not_on_the_disk(patch: Patch) -> None:
    patch.setattr(WorkerContext, "flush_journal", lambda context: None)


def ends_count_without_their_tokens(patch: Patch) -> None:
    patch.setattr(salvage, "_has_lost_tokens", lambda journal, view: False)


POWER_MUTATIONS = by_name(
    accepted_requests_are_not_on_the_disk,
    ends_count_without_their_tokens,
)
