"""States of recurrent layers: where a step finds them, and where it leaves them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from triptych.workers.execute.model.states import SequenceStates, StateKey, StateLayout, StateShape
from triptych.workers.execute.step import StepCut

CONV, SUM = StateKey(0, "conv", 0), StateKey(0, "recurrent", 0)
SHAPES = {CONV: StateShape((1, 3), torch.float32), SUM: StateShape((1,), torch.float32)}


def make_states(num_slots: int = 3, stepwise: frozenset[int] = frozenset()) -> SequenceStates:
    return SequenceStates(StateLayout(SHAPES, stepwise), num_slots, torch.device("cpu"))


def mixer(hidden: torch.Tensor, cache: Any) -> torch.Tensor:
    """[S, L, 2]: the sum of all inputs so far, and the input two tokens ago."""
    inputs = cache.update_conv_state(hidden.transpose(1, 2), 7, conv_kernel_size=3)
    sums = cache.get_recurrent_state(7)[:, None] + hidden.cumsum(dim=1)
    cache.update_recurrent_state(sums[:, -1], 7)
    return torch.cat([sums, inputs[..., 1 : 1 + hidden.shape[1]].transpose(1, 2)], dim=2)


def step(states: SequenceStates, *chunks: tuple[int, int, list[float]]) -> list[tuple[float, float]]:
    """What the mixer makes of chunks of (slot, start, inputs), those of one token first."""
    lengths = [len(inputs) for _, _, inputs in chunks]
    states.begin_step(
        StepCut(
            np.array([slot for slot, _, _ in chunks], np.int32),
            np.array([start for _, start, _ in chunks], np.int32),
            np.array(lengths, np.int32),
            num_decodes=lengths.count(1),
        )
    )
    hidden = torch.tensor([value for _, _, inputs in chunks for value in inputs])
    return [(a, b) for a, b in states.mix(0, mixer, hidden[None, :, None])[0].tolist()]


@pytest.mark.parametrize("stepwise", [frozenset(), frozenset({0})], ids=["at once", "stepwise"])
def test_sequences_go_on_each_from_its_own_state(stepwise: frozenset[int]) -> None:
    states = make_states(stepwise=stepwise)
    assert step(states, (1, 0, [5]), (3, 0, [1, 2, 3])) == [(5, 0), (1, 0), (3, 0), (6, 1)]
    assert step(states, (3, 3, [4]), (1, 1, [6, 7])) == [(10, 2), (11, 0), (18, 5)]
    assert step(states, (1, 3, [1]), (3, 4, [1])) == [(19, 6), (11, 3)]


def test_whoever_begins_knows_nothing_of_who_had_the_slot_before() -> None:
    states = make_states()
    step(states, (2, 0, [1, 2]))
    step(states, (2, 2, [3, 4]))
    assert step(states, (2, 0, [7])) == [(7, 0)]
    with pytest.raises(AssertionError, match="no state up to token"):
        step(states, (2, 4, [1]))  # that was the other one's


def test_a_step_that_failed_can_be_run_again_in_parts() -> None:
    states = make_states()
    step(states, (1, 0, [1, 2]), (2, 0, [10, 20]))
    assert step(states, (1, 2, [3]), (2, 2, [30])) == [(6, 1), (60, 10)]
    assert step(states, (2, 2, [30])) == [(60, 10)]
    assert step(states, (1, 2, [3])) == [(6, 1)]
    assert step(states, (1, 3, [4]), (2, 3, [40])) == [(10, 2), (100, 20)]


def test_padding_disturbs_nobody() -> None:
    states = make_states()
    step(states, (1, 0, [1, 2]))
    step(states, (0, 0, [9]), (0, 0, [8]), (0, 0, [7, 7]))
    assert step(states, (1, 2, [3])) == [(6, 1)]


def test_what_they_take_is_counted() -> None:
    assert StateLayout(SHAPES, frozenset()).num_bytes(3) == (2 * 4 + 1) * (3 + 1) * 4
