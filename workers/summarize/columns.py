"""Converts between columns of messages and rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...protocol.messages import StepDone


def rows_of(step: StepDone) -> Iterator[tuple[int, int, int, int, int]]:
    """Each sequence's part of a step: slot, generation, index of the token in the answer, token id, and an index into
    FINISH_REASONS, 0 if it is not finished.
    """
    return zip(
        np.frombuffer(step.slots, "<u4").tolist(),
        np.frombuffer(step.generations, "<u4").tolist(),
        np.frombuffer(step.indices, "<u4").tolist(),
        np.frombuffer(step.token_ids, "<i4").tolist(),
        step.finish_reasons,
        strict=True,
    )


class Run(NamedTuple):
    """Consecutive tokens of one sequence."""

    slot: int
    generation: int
    start: int  # index of the first token in the answer
    token_ids: list[int]
    reason: int  # index into FINISH_REASONS, 0 if it is not finished


def runs_of(step: StepDone) -> Iterator[Run]:
    """The rows of one step, or of several reported together, as runs."""
    rows = rows_of(step)
    if (first := next(rows, None)) is None:
        return
    slot, generation, start, token_id, reason = first
    token_ids = [token_id]
    for row in rows:
        if row[2] == start + len(token_ids) and row[0] == slot and row[1] == generation:
            token_ids.append(row[3])
            reason = row[4]
        else:
            yield Run(slot, generation, start, token_ids, reason)
            slot, generation, start, token_id, reason = row
            token_ids = [token_id]
    yield Run(slot, generation, start, token_ids, reason)
