"""Mutations of what is recorded of pages for the next process; see ``mutations.py``."""

from __future__ import annotations

from tests.simulation.mutations import Patch, by_name
from triptych.workers.execute.scheduling.page_store import PageStore
from triptych.workers.execute.scheduling.plan import Plan
from triptych.workers.execute.scheduling.scheduler import Scheduler
from triptych.workers.execute.scheduling.sequence import SequenceState


def evicted_pages_are_not_forgotten(patch: Patch) -> None:
    patch.setattr(PageStore, "_forget", lambda self, page: None)


def pages_of_a_step_in_flight_are_recorded(patch: Patch) -> None:
    """Nobody else could use them before they are computed, but another process could."""
    real = Scheduler.advance

    def advance(self: Scheduler, plan: Plan) -> None:
        real(self, plan)
        for sequence in self.running.values():
            if sequence.state is SequenceState.PREFILLING:
                self.cache.publish(sequence)

    patch.setattr(Scheduler, "advance", advance)


RETAINED_MUTATIONS = by_name(
    evicted_pages_are_not_forgotten,
    pages_of_a_step_in_flight_are_recorded,
)
