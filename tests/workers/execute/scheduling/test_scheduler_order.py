"""Which sequences are in a step, and with how many tokens, when memory is plentiful."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from tests.workers.execute.factories import advance, chunks_of, make_scheduler, make_sequence, make_sequences
from triptych.workers.execute.scheduling.plan import MAX_SCORED_TOKENS, Chunk, Plan, Start
from triptych.workers.execute.scheduling.sequence import SequenceState


def test_without_work_there_is_no_plan() -> None:
    assert make_scheduler().plan() is None


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 16, 17])
def test_prompt_is_computed_in_chunks_of_prefill_chunk(num_tokens: int) -> None:
    scheduler = make_scheduler(make_sequence(num_tokens=num_tokens), prefill_chunk=8)
    sizes = [advance(scheduler).chunks[0].num_tokens for _ in range(-(-num_tokens // 8))]
    assert sizes == [8] * (num_tokens // 8) + [num_tokens % 8] * (num_tokens % 8 > 0)


def test_limit_on_rows_of_logits_is_only_for_prompts_that_need_them() -> None:
    sequences = [make_sequence(0, num_tokens=600, prompt_logprobs=0), make_sequence(1, num_tokens=600)]
    scheduler = make_scheduler(*sequences, num_pages=400, prefill_chunk=1024, max_num_batched_tokens=2048)
    assert chunks_of(advance(scheduler)) == {0: MAX_SCORED_TOKENS, 1: 600}


def test_only_the_last_chunk_samples() -> None:
    scheduler = make_scheduler(make_sequence(num_tokens=20), prefill_chunk=8)
    assert [advance(scheduler).chunks[0].samples for _ in range(3)] == [False, False, True]


def test_plan_is_a_plain_value() -> None:
    scheduler = make_scheduler(make_sequence(0, num_tokens=3))
    advance(scheduler)
    scheduler.add(make_sequence(1, num_tokens=9))
    plan = scheduler.plan()
    chunks = (Chunk((0, 0), 3, 1, True), Chunk((1, 0), 0, 8, False))
    assert plan == Plan(2, chunks, num_decodes=1, starts=(Start((1, 0), 0),))
    assert json.loads(json.dumps(dataclasses.asdict(plan)))["step"] == 2


def test_several_prompts_share_a_step() -> None:
    scheduler = make_scheduler(*make_sequences(3, num_tokens=5), max_num_batched_tokens=12)
    assert chunks_of(advance(scheduler)) == {0: 5, 1: 5, 2: 2}


def test_started_prompt_continues_before_another_starts() -> None:
    scheduler = make_scheduler(*make_sequences(3, num_tokens=12), max_num_batched_tokens=10)
    assert [chunks_of(advance(scheduler)) for _ in range(3)] == [{0: 8, 1: 2}, {0: 4, 1: 6}, {0: 1, 1: 4, 2: 5}]


def test_prompts_get_little_of_a_step_with_decodes() -> None:
    scheduler = make_scheduler(make_sequence(0, num_tokens=20, max_tokens=4), mixed_prefill_tokens=3)
    assert [chunks_of(advance(scheduler)) for _ in range(3)] == [{0: 8}, {0: 8}, {0: 4}]
    for index in (1, 2):
        scheduler.add(make_sequence(index, num_tokens=2 + index))
    steps = [chunks_of(advance(scheduler)) for _ in range(4)]
    assert steps == [{0: 1, 1: 3}, {0: 1, 1: 1, 2: 3}, {0: 1, 1: 1, 2: 1}, {1: 1, 2: 1}]


def test_decodes_and_prompt_chunks_share_a_step_decodes_first() -> None:
    scheduler = make_scheduler(*make_sequences(2, num_tokens=4))
    advance(scheduler)
    scheduler.add(make_sequence(2, num_tokens=20))
    plan = advance(scheduler)
    assert [chunk.key[0] for chunk in plan.chunks] == [0, 1, 2]
    assert plan.num_decodes == 2


def test_new_prompt_never_stalls_a_decode() -> None:
    scheduler = make_scheduler(make_sequence(0, max_tokens=20), max_num_batched_tokens=8)
    advance(scheduler)
    for index in range(1, 5):
        scheduler.add(make_sequence(index, num_tokens=30))
    assert all(chunks_of(advance(scheduler))[0] == 1 for _ in range(15))


def test_no_step_exceeds_the_token_budget() -> None:
    scheduler = make_scheduler(*make_sequences(6, num_tokens=17), max_num_batched_tokens=7, prefill_chunk=5)
    while (plan := scheduler.plan()) is not None:
        scheduler.apply(plan, [1] * len(plan.sampled))
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= 7
        assert all(chunk.num_tokens <= 5 for chunk in plan.chunks)


def test_more_decodes_than_the_budget_take_turns() -> None:
    sequences = make_sequences(4, num_tokens=1, max_tokens=40)
    scheduler = make_scheduler(*sequences, max_num_batched_tokens=4)
    advance(scheduler)
    scheduler.config = dataclasses.replace(scheduler.config, max_num_batched_tokens=3)
    turns = Counter(chunk.key for _ in range(20) for chunk in advance(scheduler).chunks)
    assert set(turns.values()) == {15}


@pytest.mark.parametrize("max_prefill_skip", [1, 3, 8])
def test_waiting_prompt_gets_a_chunk_after_a_number_of_decode_steps(max_prefill_skip: int) -> None:
    decodes = make_sequences(2, num_tokens=1, max_tokens=40)
    scheduler = make_scheduler(*decodes, max_num_batched_tokens=2, max_prefill_skip=max_prefill_skip)
    advance(scheduler)
    scheduler.add(make_sequence(2, num_tokens=30))
    steps = [2 in chunks_of(advance(scheduler)) for _ in range(3 * (max_prefill_skip + 1))]
    assert steps == ([False] * max_prefill_skip + [True]) * 3


def test_prompt_that_ends_while_all_rows_are_taken_is_ready_and_holds_its_pages() -> None:
    sequences = make_sequences(3, num_tokens=4)
    scheduler = make_scheduler(*sequences, max_num_seqs=2, prefill_chunk=16)
    advance(scheduler)
    advance(scheduler)
    assert sequences[2].state is SequenceState.READY
    assert sequences[2].row is None
    assert sequences[2].num_output_tokens == 1
    assert len(sequences[2].block_table) == 1


def test_ready_sequence_takes_a_freed_row_in_the_next_step() -> None:
    sequences = make_sequences(3, num_tokens=4)
    scheduler = make_scheduler(*sequences, max_num_seqs=2, prefill_chunk=16)
    advance(scheduler)
    advance(scheduler)
    scheduler.release((0, 0))
    assert chunks_of(advance(scheduler)) == {1: 1, 2: 1}
    assert sequences[2].row == 0


def test_ready_sequences_get_rows_in_order_of_arrival() -> None:
    sequences = make_sequences(3, num_tokens=4)
    scheduler = make_scheduler(*sequences, max_num_seqs=2, prefill_chunk=16)
    advance(scheduler)
    advance(scheduler)
    assert [sequence.row for sequence in sequences] == [0, 1, None]


def test_sequences_are_ordered_by_arrival_and_not_by_the_order_of_adding() -> None:
    scheduler = make_scheduler(make_sequence(5), make_sequence(2), make_sequence(9), max_num_batched_tokens=5)
    assert chunks_of(advance(scheduler)) == {2: 5}


def test_sequence_that_ends_with_its_first_token_is_never_decoded() -> None:
    scheduler = make_scheduler(make_sequence(num_tokens=3, max_tokens=1))
    advance(scheduler)
    assert not scheduler.live
    assert scheduler.plan() is None


def test_aborted_waiting_sequence_is_never_planned() -> None:
    scheduler = make_scheduler(*make_sequences(3))
    scheduler.release((1, 0))
    assert set(chunks_of(advance(scheduler))) == {0, 2}


def test_token_of_a_sequence_released_meanwhile_is_dropped() -> None:
    scheduler = make_scheduler(*make_sequences(2))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.release((0, 0))
    assert scheduler.apply(plan, [11, 22]).by_key() == {(1, 0): 22}


def test_more_sequences_than_max_live_are_refused() -> None:
    scheduler = make_scheduler(*make_sequences(6), max_num_seqs=4)
    with pytest.raises(AssertionError, match="6 live, the limit is 6"):
        scheduler.add(make_sequence(6))


def test_key_cannot_be_live_twice() -> None:
    scheduler = make_scheduler(make_sequence(0))
    with pytest.raises(AssertionError, match="already live"):
        scheduler.add(make_sequence(0))
