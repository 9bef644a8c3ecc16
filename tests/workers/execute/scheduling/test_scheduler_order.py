"""Which sequences are in a step, and with how many tokens, when memory is plentiful.

What the first requirements say about both is in ``tests/seeds``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from tests.workers.execute.factories import advance, chunks_of, make_scheduler, make_sequence, make_sequences
from triptych.workers.execute.scheduling.plan import MAX_SCORED_TOKENS


def test_limit_on_rows_of_logits_is_only_for_prompts_that_need_them() -> None:
    sequences = [make_sequence(0, num_tokens=600, prompt_logprobs=0), make_sequence(1, num_tokens=600)]
    scheduler = make_scheduler(*sequences, num_pages=400, prefill_chunk=1024, max_num_batched_tokens=2048)
    assert chunks_of(advance(scheduler)) == {0: MAX_SCORED_TOKENS, 1: 600}


def test_only_the_last_chunk_samples() -> None:
    scheduler = make_scheduler(make_sequence(num_tokens=20), prefill_chunk=8)
    assert [advance(scheduler).chunks[0].samples for _ in range(3)] == [False, False, True]


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


def test_more_decodes_than_the_budget_take_turns() -> None:
    sequences = make_sequences(4, num_tokens=1, max_tokens=40)
    scheduler = make_scheduler(*sequences, max_num_batched_tokens=4)
    advance(scheduler)
    scheduler.config = dataclasses.replace(scheduler.config, max_num_batched_tokens=3)
    turns = Counter(chunk.key for _ in range(20) for chunk in advance(scheduler).chunks)
    assert set(turns.values()) == {15}


def test_ready_sequences_get_rows_in_order_of_arrival() -> None:
    sequences = make_sequences(3, num_tokens=4)
    scheduler = make_scheduler(*sequences, max_num_seqs=2, prefill_chunk=16)
    advance(scheduler)
    advance(scheduler)
    assert [sequence.row for sequence in sequences] == [0, 1, None]


def test_sequences_are_ordered_by_arrival_and_not_by_the_order_of_adding() -> None:
    scheduler = make_scheduler(make_sequence(5), make_sequence(2), make_sequence(9), max_num_batched_tokens=5)
    assert chunks_of(advance(scheduler)) == {2: 5}


def test_key_cannot_be_live_twice() -> None:
    scheduler = make_scheduler(make_sequence(0))
    with pytest.raises(AssertionError, match="already live"):
        scheduler.add(make_sequence(0))
