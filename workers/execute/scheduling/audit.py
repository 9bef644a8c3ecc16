"""What a scheduler holds: as statistics, and as a check that nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .plan import Plan
from .scheduler import Scheduler
from .sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class Stats:
    """Sequences by state and pages by owner, after a step."""

    num_waiting: int
    num_prefilling: int
    num_ready: int
    num_decoding: int
    num_pages: int
    num_free_pages: int
    num_held_pages: int  # by running sequences, each counted once
    num_limbo_pages: int  # by finished sequences only
    num_table_entries: int  # pages in all block tables, shared ones as often as they are shared
    num_lost_pages: int  # references that no block table accounts for; anything but 0 is a bug
    num_idle_pages: int = 0  # cached prefixes that no sequence holds, available like free pages
    num_swapped: int = 0  # of the waiting sequences
    num_host_pages: int = 0
    num_free_host_pages: int = 0
    num_idle_host_pages: int = 0  # evicted prefixes
    num_preemptions: int = 0  # since the start, as are all that follow
    num_swaps: int = 0  # preemptions that swapped pages out
    num_queried_tokens: int = 0  # of prompts that started
    num_hit_tokens: int = 0  # of these, the ones found in the cache
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0  # of these, the ones that were right

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / max(1, self.num_queried_tokens)

    @property
    def sharing(self) -> float:
        """Pages that would be needed without sharing, per page that is held."""
        num_used = self.num_held_pages + self.num_limbo_pages
        return self.num_table_entries / num_used if num_used else 1.0


def take_stats(scheduler: Scheduler) -> Stats:
    """Visits each running sequence once: for reports and traces, not for every step."""
    running, cache = scheduler.running.values(), scheduler.cache
    states = [sequence.state for sequence in running]
    num_limbo_pages = cache.limbo.num_pages
    num_entries = cache.limbo.num_entries + sum([len(sequence.block_table) for sequence in running])
    return Stats(
        num_waiting=len(scheduler.waiting),
        num_prefilling=states.count(SequenceState.PREFILLING) + states.count(SequenceState.PAUSED),
        num_ready=states.count(SequenceState.READY),
        num_decoding=states.count(SequenceState.DECODING),
        num_pages=cache.num_pages,
        num_free_pages=cache.pool.num_free,
        num_held_pages=cache.pool.num_held - num_limbo_pages,
        num_limbo_pages=num_limbo_pages,
        num_table_entries=num_entries,
        num_lost_pages=cache.pool.num_refs - num_entries,
        num_idle_pages=cache.pool.num_idle,
        num_swapped=scheduler.roster.num_swapped,
        num_host_pages=cache.host.num_pages,
        num_free_host_pages=cache.host.num_free,
        num_idle_host_pages=cache.host.num_prefixes,
        num_preemptions=scheduler.roster.num_preemptions,
        num_swaps=scheduler.roster.num_swaps,
        num_queried_tokens=cache.num_queried_tokens,
        num_hit_tokens=cache.num_hit_tokens,
        num_proposed_tokens=scheduler.proposals.num_proposed,
        num_accepted_tokens=scheduler.proposals.num_accepted,
    )


class MemoryUse(NamedTuple):
    """How much of the pages of running sequences is unused, in tokens."""

    num_reserved: int  # cells without a token that the sequence can still fill
    num_fragmented: int  # cells that the sequence can never fill


def measure_memory(scheduler: Scheduler) -> MemoryUse:
    """Visits each running sequence; for reports, not for every step."""
    size = scheduler.cache.pool.page_size
    num_reserved = num_fragmented = 0
    for sequence in scheduler.running.values():
        num_empty = len(sequence.block_table) * size - sequence.num_computed_tokens
        num_to_come = min(num_empty, len(sequence.tokens) - sequence.num_computed_tokens)
        num_reserved += num_to_come
        num_fragmented += num_empty - num_to_come
    return MemoryUse(num_reserved, num_fragmented)


def check_plan(scheduler: Scheduler, plan: Plan) -> None:
    """Check that a planned step that has not been launched writes to no page that another block table contains.

    Raises:
        AssertionError: it does; names the page, its writer, and the number of holders.
    """
    pool = scheduler.cache.pool
    for chunk in plan.chunks:
        table = scheduler.running[chunk.key].block_table
        for page in table[chunk.start // pool.page_size : pool.pages_for(chunk.start + chunk.num_tokens)]:
            assert pool.refs(page) == 1, f"{chunk.key} writes to page {page}, which {pool.refs(page)} hold"


def check(scheduler: Scheduler) -> None:
    """Check the invariants of scheduler, rows and pages. Visits everything: for tests.

    Raises:
        PageLedgerError: a page is lost or miscounted.
        AssertionError: the state of a sequence is inconsistent.
    """
    waiting = list(scheduler.waiting)
    scheduler.cache.check(scheduler.running.values(), waiting)
    scheduler.rows.check()
    assert {s.key for s in waiting} | set(scheduler.running) == set(scheduler.live), "live is not waiting and running"
    assert len(waiting) + len(scheduler.running) == len(scheduler.live), "a sequence waits and runs"
    num_swapped = sum(s.state is SequenceState.SWAPPED for s in waiting)
    assert num_swapped == scheduler.roster.num_swapped, f"{num_swapped} are swapped, and counted wrongly"
    for sequence in waiting:
        _check_waiting(scheduler, sequence)
    for sequence in scheduler.running.values():
        _check_running(scheduler, sequence)


def _check_waiting(scheduler: Scheduler, sequence: Sequence) -> None:
    assert not sequence.block_table, f"{sequence.key} waits and holds {sequence.block_table}"
    assert sequence.row is None, f"{sequence.key} waits and holds row {sequence.row}"
    assert sequence.state_rows is None, f"{sequence.key} waits and holds {sequence.state_rows}"
    num_computed, is_swapped = sequence.num_computed_tokens, sequence.state is SequenceState.SWAPPED
    assert is_swapped or sequence.state is SequenceState.WAITING, f"{sequence.key} waits and is {sequence.state}"
    assert is_swapped == (num_computed > 0), f"{sequence.key} is {sequence.state} with {num_computed} computed"
    num_pages = scheduler.cache.pages_for(num_computed)
    assert len(sequence.host_table) == num_pages, f"{sequence.key} has {sequence.host_table}, needs {num_pages}"


def _check_running(scheduler: Scheduler, sequence: Sequence) -> None:
    is_decoding = sequence.state is SequenceState.DECODING
    assert is_decoding == (sequence.row is not None), f"{sequence.key} is {sequence.state}, row {sequence.row}"
    assert not sequence.host_table, f"{sequence.key} runs and holds host pages {sequence.host_table}"
    num_pages = scheduler.cache.pages_for(sequence.num_computed_tokens)
    is_in_flight = sequence.last_step > scheduler.completed_step  # then it has pages for what is being computed
    has_right_pages = len(sequence.block_table) == num_pages or (is_in_flight and len(sequence.block_table) > num_pages)
    assert has_right_pages, f"{sequence.key} has {sequence.block_table}, needs {num_pages}"
    num_left = sequence.num_uncomputed_tokens
    has_right_state = (sequence.state is SequenceState.PAUSED) == (num_left == 0) or not sequence.is_beam
    assert has_right_state or is_in_flight, f"{sequence.key} is {sequence.state} with {num_left} tokens to compute"
