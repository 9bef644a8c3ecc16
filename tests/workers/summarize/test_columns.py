"""The columns of a step as runs of tokens."""

from __future__ import annotations

import numpy as np

from triptych.protocol import messages as m
from triptych.workers.summarize.columns import runs_of


def step_of(*rows: tuple[int, int, int, int, int]) -> m.StepDone:
    slots, generations, indices, token_ids = (np.array([row[i] for row in rows], "<u4").tobytes() for i in range(4))
    return m.StepDone(slots, generations, indices, token_ids, bytes(row[4] for row in rows))


def test_consecutive_rows_of_a_sequence_form_one_run() -> None:
    step = step_of(
        (0, 7, 3, 10, 0), (0, 7, 4, 11, 0), (1, 7, 5, 12, 0), (1, 8, 6, 13, 0), (0, 7, 5, 14, 2), (0, 7, 7, 15, 0)
    )
    runs = [(0, 7, 3, [10, 11], 0), (1, 7, 5, [12], 0), (1, 8, 6, [13], 0), (0, 7, 5, [14], 2), (0, 7, 7, [15], 0)]
    assert list(runs_of(step)) == runs
    assert list(runs_of(step_of())) == []
