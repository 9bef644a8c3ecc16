"""Pages shared by several sequences: when they are found, when they are not, and who may write to them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.execute.factories import (
    advance,
    advance_until,
    chunks_of,
    expected_output,
    make_engine,
    make_scheduler,
    make_sequence,
    run,
)
from triptych.protocol.arrays import Int32
from triptych.workers.execute.scheduling import shared_prompts
from triptych.workers.execute.scheduling.audit import check, take_stats
from triptych.workers.execute.scheduling.prefix import Match, PrefixIndex
from triptych.workers.execute.scheduling.scheduler import Scheduler
from triptych.workers.execute.scheduling.sequence import Sequence, num_common


def served_before(num_tokens: int = 16, **options: Any) -> Scheduler:
    """A scheduler that has served one prompt of speaker 0, and holds only its cached pages."""
    scheduler = make_scheduler(
        make_sequence(0, speaker=0, num_tokens=num_tokens, max_tokens=1), prefix_cache=True, prefill_chunk=64, **options
    )
    advance(scheduler)
    scheduler.release((0, 0))
    return scheduler


def start(scheduler: Scheduler, sequence: Sequence) -> int:
    """Add ``sequence``; returns how many of its tokens the next step computes."""
    scheduler.add(sequence)
    num_tokens = chunks_of(advance(scheduler))[sequence.key[0]]
    check(scheduler)
    return num_tokens


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_tokens", [2, 15, 16, 17, 48])
def test_completely_cached_prompt_computes_exactly_one_token(num_tokens: int, page_size: int) -> None:
    scheduler = served_before(48, page_size=page_size)
    assert start(scheduler, make_sequence(1, speaker=0, num_tokens=num_tokens)) == 1
    assert scheduler.live[1, 0].num_cached_tokens == num_tokens - 1


@pytest.mark.parametrize(("num_tokens", "computed"), [(17, 1), (20, 4), (24, 8)])
def test_tokens_after_a_cached_prefix_are_computed(num_tokens: int, computed: int) -> None:
    assert start(served_before(16), make_sequence(1, speaker=0, num_tokens=num_tokens)) == computed


def test_different_prompt_of_the_same_length_shares_nothing() -> None:
    assert start(served_before(16), make_sequence(1, num_tokens=16)) == 16


def test_equal_pages_after_different_prefixes_are_not_shared() -> None:
    sequence = make_sequence(1, speaker=0, num_tokens=16)
    sequence.tokens[0] += 1
    assert start(served_before(16), sequence) == 16


def test_different_salt_shares_nothing() -> None:
    sequence = make_sequence(1, speaker=0, num_tokens=16)
    sequence.cache_salt = "another tenant"
    assert start(served_before(16), sequence) == 16


def test_page_is_found_while_the_sequence_that_computed_it_still_runs() -> None:
    scheduler = make_scheduler(make_sequence(0, speaker=0, num_tokens=18), prefix_cache=True, prefill_chunk=64)
    advance(scheduler)
    assert start(scheduler, make_sequence(1, speaker=0, num_tokens=18)) == 2
    first, second = scheduler.live.values()
    assert first.block_table[:4] == second.block_table[:4]
    assert first.block_table[4] != second.block_table[4]


def half_equal() -> list[Sequence]:
    """Two prompts of 20 tokens whose first 8 are equal: too few for one to wait for the other."""
    pair = [make_sequence(index, speaker=0, num_tokens=20) for index in range(2)]
    pair[1].tokens[8:20] += 1
    return pair


def test_page_is_not_found_before_its_step_has_completed() -> None:
    scheduler = make_scheduler(*half_equal(), prefix_cache=True, prefill_chunk=64, max_num_batched_tokens=64)
    assert chunks_of(advance(scheduler)) == {0: 20, 1: 20}


def test_equal_pages_computed_in_one_step_are_merged() -> None:
    pair = half_equal()
    scheduler = make_scheduler(*pair, prefix_cache=True, prefill_chunk=64, max_num_batched_tokens=64)
    advance(scheduler)
    assert pair[0].block_table[:2] == pair[1].block_table[:2]
    assert take_stats(scheduler).sharing == 10 / 8
    check(scheduler)


def test_page_merged_while_decoding_is_replaced_in_the_row_too() -> None:
    pair = [make_sequence(index, speaker=0, num_tokens=6) for index in range(2)]
    scheduler = make_scheduler(*pair, prefix_cache=True, max_num_batched_tokens=64)
    for _ in range(4):
        advance(scheduler)
        check(scheduler)
    assert pair[0].num_computed_tokens == 9
    assert pair[0].block_table[:2] == pair[1].block_table[:2]
    assert scheduler.rows.block_tables[pair[1].row, :2].tolist() == pair[0].block_table[:2]


def test_pages_of_a_failed_sequence_are_never_found() -> None:
    scheduler = make_scheduler(make_sequence(0, speaker=0, num_tokens=16), prefix_cache=True, prefill_chunk=8)
    advance(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(plan, [1], failed={(0, 0): "not a number"})
    assert start(scheduler, make_sequence(1, speaker=0, num_tokens=16)) == 8
    assert take_stats(scheduler).num_hit_tokens == 0


def test_output_is_found_by_the_next_turn_of_a_conversation() -> None:
    first = make_sequence(0, num_tokens=10, max_tokens=8)
    engine = make_engine(first, prefix_cache=True)
    run(engine)
    second = make_sequence(1, num_tokens=24)
    second.tokens[:18] = first.tokens
    engine.add(second)
    assert run(engine)[second.key] == expected_output(second)
    assert second.num_cached_tokens == 16


def test_copied_tail_is_a_separate_page() -> None:
    scheduler = served_before(16)
    first, second = (make_sequence(index, speaker=0, num_tokens=16) for index in (1, 2))
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.moves.copies == ((4, first.block_table[3]), (4, second.block_table[3]))
    assert len({4, first.block_table[3], second.block_table[3]}) == 3


@pytest.mark.parametrize(("num_equal", "cached"), [(1, 0), (3, 0), (4, 4), (7, 7)])
def test_tail_that_saves_less_than_half_a_page_is_not_copied(num_equal: int, cached: int) -> None:
    scheduler = served_before(16, page_size=8)
    sequence = make_sequence(1, speaker=0, num_tokens=40)
    sequence.tokens[num_equal:40] += 1
    start(scheduler, sequence)
    assert sequence.num_cached_tokens == cached


# Memory


def test_unreferenced_cached_pages_count_as_free_and_are_evicted_before_a_preemption() -> None:
    scheduler = served_before(40, num_pages=12)
    sequence = make_sequence(1, num_tokens=30, max_tokens=15)
    assert start(scheduler, sequence) == 30
    advance_until(scheduler, lambda _: not scheduler.live)
    assert (sequence.num_output_tokens, scheduler.roster.num_preemptions) == (15, 0)


def test_least_recently_used_page_is_evicted_first_and_children_before_parents() -> None:
    scheduler = served_before(16, num_pages=9)
    for index in (1, 2):
        start(scheduler, make_sequence(index, num_tokens=14, max_tokens=1))
        scheduler.release((index, 0))
    again = make_sequence(3, speaker=0, num_tokens=17)
    start(scheduler, again)
    assert again.num_cached_tokens == 8  # of 16; its last two pages were evicted


def test_referenced_page_is_never_evicted() -> None:
    scheduler = make_scheduler(
        make_sequence(0, speaker=0, num_tokens=16, max_tokens=30), prefix_cache=True, prefill_chunk=64, num_pages=9
    )
    advance(scheduler)
    second = make_sequence(1, speaker=0, num_tokens=18, max_tokens=6)
    start(scheduler, second)
    advance_until(scheduler, lambda _: second.key not in scheduler.live)
    check(scheduler)
    assert scheduler.live[0, 0].block_table[:4] == list(range(1, 5))


def test_cached_prefix_held_by_others_needs_no_free_pages() -> None:
    scheduler = make_scheduler(
        make_sequence(0, speaker=0, num_tokens=36, max_tokens=4), prefix_cache=True, prefill_chunk=64, num_pages=12
    )
    advance(scheduler)
    assert start(scheduler, make_sequence(1, speaker=0, num_tokens=37, max_tokens=2)) == 1


def test_preempted_sequence_finds_its_pages_again() -> None:
    pair = [make_sequence(index, num_tokens=8, max_tokens=30) for index in range(2)]
    scheduler = make_scheduler(*pair, prefix_cache=True, num_pages=11, prefill_chunk=64)
    advance_until(scheduler, lambda plan: plan.preempted)
    num_tokens = pair[1].num_tokens
    scheduler.release((0, 0))
    assert chunks_of(advance(scheduler))[1] < num_tokens / 2
    assert pair[1].num_cached_tokens == 0  # there were none when it arrived


def test_shared_limbo_pages_are_not_counted_twice_as_available() -> None:
    pair = [make_sequence(index, speaker=0, num_tokens=16, max_tokens=1 + 20 * index) for index in range(2)]
    scheduler = make_scheduler(*pair, prefix_cache=True, prefill_chunk=64, max_num_batched_tokens=64, num_pages=9)
    advance(scheduler)
    advance(scheduler)
    assert scheduler.cache.limbo.num_entries == 4
    assert scheduler.cache.num_available == 5


def test_cached_prefix_in_limbo_is_not_counted_both_as_held_and_as_available() -> None:
    runs = make_sequence(0, num_tokens=12, max_tokens=30)
    ended = make_sequence(1, speaker=5, num_tokens=16, max_tokens=1)
    scheduler = make_scheduler(runs, ended, prefix_cache=True, prefill_chunk=64, num_pages=9)
    advance(scheduler)
    assert scheduler.cache.limbo.num_pages == 4
    scheduler.add(make_sequence(2, speaker=5, num_tokens=20))
    assert 2 not in chunks_of(advance(scheduler))  # five pages, of which four can be taken from limbo, and one is free


def test_hits_are_counted_in_tokens() -> None:
    scheduler = served_before(16)
    start(scheduler, make_sequence(1, speaker=0, num_tokens=24))
    stats = take_stats(scheduler)
    assert (stats.num_queried_tokens, stats.num_hit_tokens, stats.hit_rate) == (40, 16, 0.4)


def test_plan_contains_the_number_of_cached_tokens_of_a_start() -> None:
    scheduler = served_before(16)
    scheduler.add(make_sequence(1, speaker=0, num_tokens=24))
    assert advance(scheduler).starts == (((1, 0), 16),)


@pytest.mark.parametrize("depth", [0, 1])
def test_common_prefix_of_prompts_that_arrive_together_is_computed_once(depth: int) -> None:
    sequences = [make_sequence(i, speaker=0, num_tokens=20 + i, max_tokens=3) for i in range(4)]
    sequences.append(make_sequence(9, num_tokens=6, max_tokens=3))
    engine = make_engine(*sequences, prefix_cache=True, prefill_chunk=8, max_num_batched_tokens=64, depth=depth)
    num_computed = 0
    outputs: dict[int, list[int]] = {}
    while engine.has_work:
        step = engine.step()
        assert step is not None
        num_computed += sum(chunk.num_tokens for chunk in step.plan.chunks)
        for key, token in zip(step.progress.keys, step.progress.token_ids, strict=True):
            outputs.setdefault(key[0], []).append(token)
        engine.check()
    assert outputs == {s.key[0]: expected_output(s) for s in sequences}
    rest = sum((20 + i) - 20 for i in range(1, 4))  # of the other prompts, since the page shared by all is cached
    assert num_computed == 20 + rest + 6 + 5 * 2


def test_prompts_wait_for_a_common_prefix_only_if_it_will_be_shared() -> None:
    alike = [make_sequence(i, speaker=0, num_tokens=20) for i in range(2)]
    scheduler = make_scheduler(*alike, prefix_cache=False, prefill_chunk=8, max_num_batched_tokens=12)
    assert chunks_of(advance(scheduler)) == {0: 8, 1: 4}


def test_unrelated_prompt_overtakes_those_that_wait_for_a_prefix() -> None:
    scheduler = make_scheduler(
        *(make_sequence(i, speaker=0, num_tokens=40) for i in range(2)),
        make_sequence(2, num_tokens=5),
        prefix_cache=True,
        max_num_batched_tokens=16,
    )
    assert chunks_of(advance(scheduler)) == {0: 8, 2: 5}


def test_prompt_does_not_wait_for_one_with_another_salt() -> None:
    """Its pages would be of no use."""
    sequences = [make_sequence(i, speaker=0, num_tokens=40) for i in range(2)]
    sequences[1].cache_salt = "another tenant"
    scheduler = make_scheduler(*sequences, prefix_cache=True, max_num_batched_tokens=16)
    assert chunks_of(advance(scheduler)) == {0: 8, 1: 8}


def test_waiting_sequence_computes_the_prefix_if_the_other_one_is_gone() -> None:
    scheduler = make_scheduler(*(make_sequence(i, speaker=0, num_tokens=40) for i in range(2)), prefix_cache=True)
    advance(scheduler)
    scheduler.release((0, 0))
    assert chunks_of(advance(scheduler)) == {1: 8}
    assert scheduler.live[1, 0].num_cached_tokens == 8


def test_followers_are_not_looked_up_again_while_their_leader_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 behind a prompt of 100,000 tokens took 37 ms of each of its 195 steps."""
    sequences = [make_sequence(i, speaker=0, num_tokens=80 + i, max_tokens=2) for i in range(4)]
    scheduler = make_scheduler(*sequences, prefix_cache=True, prefill_chunk=8, max_num_batched_tokens=64)
    match, looked_up = PrefixIndex.match, []

    def spy(index: PrefixIndex, tokens: Int32, salt: str) -> Match:
        looked_up.append(len(tokens))
        return match(index, tokens, salt)

    monkeypatch.setattr(PrefixIndex, "match", spy)
    assert [chunks_of(advance(scheduler)) for _ in range(9)] == [{0: 8}] * 9
    assert len(looked_up) == 4
    advance_until(scheduler, lambda plan: len(plan.starts) == 3)
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 80, 80, 80]


def test_followers_that_start_together_are_looked_up_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """And compared with each other only where they differ: of a hundred behind 30,000 tokens, a plan took 0.3 s."""
    sequences = [make_sequence(i, speaker=0, num_tokens=400, max_tokens=2) for i in range(20)]
    for i, sequence in enumerate(sequences):
        sequence.tokens[390:400] = 10 + i
    options: dict[str, Any] = {"max_num_seqs": 20, "prefill_chunk": 400, "max_num_batched_tokens": 1000}
    scheduler = make_scheduler(*sequences, prefix_cache=True, num_pages=1000, **options)
    assert chunks_of(advance(scheduler)) == {0: 400}
    match, looked_up, compared = PrefixIndex.match, [], []

    def spy(index: PrefixIndex, tokens: Int32, salt: str) -> Match:
        looked_up.append(len(tokens))
        return match(index, tokens, salt)

    def compare(first: Sequence, second: Sequence, limit: int) -> int:
        compared.append(limit)
        return num_common(first, second, limit)

    monkeypatch.setattr(PrefixIndex, "match", spy)
    monkeypatch.setattr(shared_prompts, "num_common", compare)
    assert chunks_of(advance(scheduler)) == {i: 1 if i == 0 else 10 for i in range(20)}
    assert (len(looked_up), compared) == (19, [])
