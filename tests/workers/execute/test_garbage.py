"""A step that raises has written garbage wherever it would have written: nothing of it may remain."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.workers.execute.factories import expected_output, make_engine, make_group, make_sequence, recover, run
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.step import StepInputs, StepResult

GARBAGE = -1  # where a token should be
NUM_RUNS = 40


class Fails(HashRunner):
    """Some steps with several sequences raise when they are launched, or collected, and pass when they run again."""

    dice: ClassVar[random.Random]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._fates: deque[bool] = deque()  # of the launched steps: whether they raise

    def launch(self, inputs: StepInputs) -> None:
        chance = self.dice.random() if len(inputs.context_lens) > 1 else 1.0
        super().launch(inputs)
        if chance < 0.3:
            self._cells.reshape(-1)[inputs.slot_mapping] = GARBAGE
            self._last_tokens = np.ones_like(self._last_tokens)
        if chance < 0.1:
            self._results.pop()
            raise ValueError("bad luck")
        self._fates.append(chance < 0.3)

    def collect(self) -> StepResult:
        result = super().collect()
        if self._fates.popleft():
            raise ValueError("bad luck")
        return result


def random_sequences(dice: random.Random) -> Iterator[Sequence]:
    """Single ones and greedy samples, which have equal outputs, some of them with tokens from before a crash."""
    index = 0
    for size in dice.choices((1, 2, 3), k=2):
        prompt: dict[str, Any] = {
            "num_tokens": dice.randrange(1, 12),
            "max_tokens": dice.randrange(4, 12),
            "temperature": 0.0,
        }
        group = make_group(index, size, **prompt) if size > 1 else [make_sequence(index, **prompt)]
        index += size
        for sequence in group:
            yield recover(sequence, dice.choice((0, dice.randrange(sequence.max_tokens))))


@pytest.mark.parametrize("depth", [0, 1])
def test_nothing_remains_of_what_failed_steps_have_written(depth: int) -> None:
    for seed in range(NUM_RUNS):
        Fails.dice = dice = random.Random(seed)
        sequences = list(random_sequences(dice))
        options: dict[str, Any] = {
            "prefix_cache": dice.random() < 0.5,
            "page_size": dice.choice((2, 4, 16)),
            "num_pages": dice.choice((16, 32, 64)),
            "host_pages": dice.choice((0, 8)),
            "replays": dice.random() < 0.3,
            "policy": dice.choice(("fifo", "round_robin", "prefill_first")),
            "max_num_seqs": dice.choice((4, 6)),
        }
        run(make_engine(*sequences, depth=depth, runner=Fails, **options))
        found = [sequence.output_tokens.tolist() for sequence in sequences]
        assert found == [expected_output(sequence) for sequence in sequences], f"seed {seed}"
