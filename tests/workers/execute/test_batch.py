from __future__ import annotations

import numpy as np

from tests.workers.execute.factories import advance, make_scheduler, make_sequence
from triptych.workers.execute.batch import build_inputs
from triptych.workers.execute.scheduling.scheduler import Scheduler
from triptych.workers.execute.step import StepInputs


def next_inputs(scheduler: Scheduler) -> StepInputs:
    plan = scheduler.plan()
    assert plan is not None
    return build_inputs(plan, scheduler.running, scheduler.rows, page_size=scheduler.cache.pool.page_size)


def mixed_step() -> StepInputs:
    """A decode of sequence 0 (pages 1, 2; its fifth token) and the first seven tokens of sequence 1 (pages 3, 4)."""
    scheduler = make_scheduler(make_sequence(0, num_tokens=4), page_size=4, max_num_batched_tokens=8)
    advance(scheduler, token_id=77)
    scheduler.add(make_sequence(1, num_tokens=9))
    return next_inputs(scheduler)


def test_tokens_and_positions_are_ragged_decodes_first() -> None:
    inputs = mixed_step()
    assert inputs.token_ids.tolist() == [77, *make_sequence(1, num_tokens=9).tokens[:7]]
    assert inputs.positions.tolist() == [4, 0, 1, 2, 3, 4, 5, 6]
    assert inputs.query_starts.tolist() == [0, 1, 8]
    assert inputs.num_decodes == 1


def test_slots_follow_the_block_tables() -> None:
    inputs = mixed_step()
    assert inputs.block_tables.tolist() == [[1, 2], [3, 4]]
    assert inputs.slot_mapping.tolist() == [8, 12, 13, 14, 15, 16, 17, 18]
    assert inputs.context_lens.tolist() == [5, 7]


def test_only_sequences_that_need_a_token_are_sampled() -> None:
    inputs = mixed_step()
    assert inputs.sample_rows.tolist() == [0]
    assert [sequence.key for sequence in inputs.sampled] == [(0, 0)]


def test_shorter_block_tables_are_padded_with_the_trash_page() -> None:
    scheduler = make_scheduler(make_sequence(0, num_tokens=8), make_sequence(1, num_tokens=3))
    advance(scheduler)
    assert next_inputs(scheduler).block_tables.tolist() == [[1, 2, 4], [3, 0, 0]]


def test_chunk_continues_in_the_half_full_page() -> None:
    scheduler = make_scheduler(make_sequence(num_tokens=10), page_size=4, prefill_chunk=6)
    advance(scheduler)
    assert next_inputs(scheduler).slot_mapping.tolist() == [10, 11, 12, 13]


def test_arrays_have_the_documented_types() -> None:
    inputs = mixed_step()
    assert inputs.slot_mapping.dtype == np.int64
    for name in ("token_ids", "positions", "query_starts", "context_lens", "block_tables", "sample_rows"):
        assert getattr(inputs, name).dtype == np.int32, name
