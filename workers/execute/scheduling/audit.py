"""What a scheduler holds: in numbers for whoever watches, and as a proof that nothing is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .scheduler import Scheduler
from .sequence import SequenceState


@dataclass(frozen=True, slots=True)
class Stats:
    """Sequences by state and pages by owner, after a step."""

    num_waiting: int
    num_prefilling: int
    num_ready: int
    num_decoding: int
    num_preemptions: int  # since the start
    num_pages: int
    num_free_pages: int
    num_held_pages: int
    num_limbo_pages: int

    @property
    def num_lost_pages(self) -> int:
        """Pages that nobody accounts for. Anything but 0 is a bug."""
        return self.num_pages - self.num_free_pages - self.num_held_pages - self.num_limbo_pages


def take_stats(scheduler: Scheduler) -> Stats:
    """Cheap enough for every step: looks at each running sequence once."""
    running = scheduler.running.values()
    states = Counter([sequence.state for sequence in running])
    return Stats(
        num_waiting=len(scheduler.waiting),
        num_prefilling=states[SequenceState.PREFILLING],
        num_ready=states[SequenceState.READY],
        num_decoding=states[SequenceState.DECODING],
        num_preemptions=scheduler.num_preemptions,
        num_pages=scheduler.cache.num_pages,
        num_free_pages=scheduler.cache.pool.num_free,
        num_held_pages=sum([len(sequence.block_table) for sequence in running]),
        num_limbo_pages=scheduler.cache.limbo.num_pages,
    )


def check(scheduler: Scheduler) -> None:
    """Proves the invariants of scheduler, rows and pages. Looks at everything: for tests, and after a suspicion.

    Raises:
        PageLedgerError: a page is lost, or counted wrongly.
        AssertionError: a sequence is not where its state says.
    """
    scheduler.cache.check(scheduler.running.values())
    scheduler.rows.check()
    waiting = list(scheduler.waiting)
    assert {s.key for s in waiting} | set(scheduler.running) == set(scheduler.live), "live is not waiting and running"
    assert len(waiting) + len(scheduler.running) == len(scheduler.live), "a sequence waits and runs"
    for sequence in waiting:
        assert sequence.state is SequenceState.WAITING, f"{sequence.key} waits and is {sequence.state}"
        assert not sequence.block_table, f"{sequence.key} waits and holds {sequence.block_table}"
        assert sequence.row is None, f"{sequence.key} waits and holds row {sequence.row}"
        assert sequence.num_computed_tokens == 0, f"{sequence.key} waits with {sequence.num_computed_tokens} computed"
    for sequence in scheduler.running.values():
        is_decoding = sequence.state is SequenceState.DECODING
        assert is_decoding == (sequence.row is not None), f"{sequence.key} is {sequence.state}, row {sequence.row}"
        num_pages = scheduler.cache.pages_for(sequence.num_computed_tokens)
        assert len(sequence.block_table) == num_pages, f"{sequence.key} has {sequence.block_table}, needs {num_pages}"
