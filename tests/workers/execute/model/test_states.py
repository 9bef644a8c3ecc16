"""States of recurrent layers: where a step reads and writes them."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import pytest
import torch

from triptych.workers.execute.model.states import SequenceStates, StateKey, StateLayout, StateShape
from triptych.workers.execute.scheduling.states import Segment
from triptych.workers.execute.step import StepCut

CONV, SUM = StateKey(0, "conv", 0), StateKey(0, "recurrent", 0)
SHAPES = {CONV: StateShape((1, 3), torch.float32), SUM: StateShape((1,), torch.float32)}


def make_states(num_rows: int = 6, stepwise: frozenset[int] = frozenset()) -> SequenceStates:
    return SequenceStates(StateLayout(SHAPES, stepwise), num_rows, torch.device("cpu"))


def mixer(hidden: torch.Tensor, cache: Any) -> torch.Tensor:
    """[S, L, 2]: the sum of all inputs so far, and the input two tokens ago."""
    inputs = cache.update_conv_state(hidden.transpose(1, 2), 7, conv_kernel_size=3)
    sums = cache.get_recurrent_state(7)[:, None] + hidden.cumsum(dim=1)
    cache.update_recurrent_state(sums[:, -1], 7)
    return torch.cat([sums, inputs[..., 1 : 1 + hidden.shape[1]].transpose(1, 2)], dim=2)


def step(states: SequenceStates, *segments: tuple[int, int, int, list[float]]) -> list[tuple[float, float]]:
    """The mixer's outputs for segments of (row to read, row to write, start, inputs); decodes come first."""
    num_decodes = len(list(takewhile(lambda segment: len(segment[3]) == 1, segments)))
    cut = [Segment(read, write, start, len(inputs)) for read, write, start, inputs in segments]
    states.begin_step(StepCut.of(cut, num_decodes=num_decodes))
    hidden = torch.tensor([value for *_, inputs in segments for value in inputs])
    return [(a, b) for a, b in states.mix(0, mixer, hidden[None, :, None])[0].tolist()]


@pytest.mark.parametrize("stepwise", [frozenset(), frozenset({0})], ids=["at once", "stepwise"])
def test_each_sequence_continues_from_its_own_state(stepwise: frozenset[int]) -> None:
    states = make_states(stepwise=stepwise)
    assert step(states, (0, 1, 0, [5]), (0, 3, 0, [1, 2, 3])) == [(5, 0), (1, 0), (3, 0), (6, 1)]
    assert step(states, (3, 4, 3, [4]), (1, 2, 1, [6, 7])) == [(10, 2), (11, 0), (18, 5)]
    assert step(states, (2, 1, 3, [1]), (4, 3, 4, [1])) == [(19, 6), (11, 3)]


def test_intermediate_state_is_kept_for_other_sequences() -> None:
    states = make_states()
    whole = step(states, (0, 1, 0, [1, 2, 3, 4, 5]))
    assert step(states, (0, 3, 0, [1, 2]), (3, 4, 2, [3, 4]), (4, 2, 4, [5])) == whole
    assert step(states, (3, 5, 2, [10]), (4, 6, 4, [10])) == [(13, 1), (20, 3)]
    assert step(states, (3, 5, 2, [3, 4, 5])) == whole[2:]


def test_new_sequence_is_independent_of_its_row_s_previous_one() -> None:
    states = make_states()
    step(states, (0, 1, 0, [1, 2]))
    step(states, (1, 2, 2, [3, 4]))
    assert step(states, (2, 1, 0, [7])) == [(7, 0)]
    with pytest.raises(AssertionError, match="no state up to token"):
        step(states, (1, 2, 4, [1]))  # belongs to the other one


def test_failed_step_can_be_repeated_in_parts() -> None:
    states = make_states()
    step(states, (0, 1, 0, [1, 2]), (0, 2, 0, [10, 20]))
    assert step(states, (1, 3, 2, [3]), (2, 4, 2, [30])) == [(6, 1), (60, 10)]
    assert step(states, (2, 4, 2, [30])) == [(60, 10)]
    assert step(states, (1, 3, 2, [3])) == [(6, 1)]
    assert step(states, (3, 1, 3, [4]), (4, 2, 3, [40])) == [(10, 2), (100, 20)]


def test_padding_changes_no_state() -> None:
    states = make_states()
    step(states, (0, 1, 0, [1, 2]))
    step(states, (0, 0, 0, [9]), (0, 0, 0, [8]), (0, 0, 0, [7, 7]))
    assert step(states, (1, 2, 2, [3])) == [(6, 1)]


def test_memory_of_states_is_counted() -> None:
    assert StateLayout(SHAPES, frozenset()).num_bytes(8) == (8 + 2) * (3 + 1) * 4
