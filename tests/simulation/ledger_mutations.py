"""Mutations of the ledger; see ``mutations.py``."""

from __future__ import annotations

from tests.simulation.mutations import Patch, by_name
from triptych.workers.summarize import ledger


def lost_time_is_counted_twice(patch: Patch) -> None:
    """In the stages in which it was lost, and as lost."""
    patch.setattr(ledger, "_take", lambda stages_ns, stages, duration_ns: duration_ns)


LEDGER_MUTATIONS = by_name(lost_time_is_counted_twice)
