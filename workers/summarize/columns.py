"""Columns of messages, as rows and back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...protocol.messages import StepDone


def rows_of(step: StepDone) -> Iterator[tuple[int, int, int, int, int]]:
    """Each sequence's part of a step: slot, generation, index of the token in the answer, token id, and an index into
    FINISH_REASONS, 0 where it goes on.
    """
    return zip(
        np.frombuffer(step.slots, "<u4").tolist(),
        np.frombuffer(step.generations, "<u4").tolist(),
        np.frombuffer(step.indices, "<u4").tolist(),
        np.frombuffer(step.token_ids, "<i4").tolist(),
        step.finish_reasons,
        strict=True,
    )


def columns_of(keys: list[tuple[int, int]]) -> tuple[bytes, bytes]:
    """Slots and generations."""
    slots, generations = np.array(keys, "<u4").reshape(-1, 2).T
    return slots.tobytes(), generations.tobytes()
