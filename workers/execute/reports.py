"""What summarize hears of the steps: a message each, or one for several where steps are short."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...protocol.channels import Links
from ...protocol.messages import StepDone


class StepRows(NamedTuple):
    """What steps brought, a row a token or end; those of one sequence in order."""

    step: int  # the last
    collected_at: int
    slots: npt.NDArray[np.int64]  # [n], as all columns
    generations: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]
    reasons: bytes  # indices into FINISH_REASONS


class Reports:
    """Messages on their way to summarize.

    One wakes a thread of ZeroMQ here, summarize, and each client that follows, and its rows cost each of them about as
    much as tokens do: where a step takes less than a few milliseconds, and the processors that tell are those that
    compute, that is a good part of it.
    """

    def __init__(self, links: Links, *, interval_ms: float) -> None:
        self._links = links
        self._interval_s = interval_ms / 1e3
        self._due = 0.0  # when the interval since the last one is over

    def may_wait(self, next_in_s: float) -> bool:
        """Whether what is known now can be told in ``next_in_s``, when there will be more: before the interval is over,
        so that nobody hears of a token later than the interval after it was known.
        """
        return time.monotonic() + next_in_s < self._due

    def send(self, parts: list[StepRows]) -> None:
        """Tell the rows of all. Whether the message is lost, the journal has them already."""
        self._due = time.monotonic() + self._interval_s
        self._links.send("summarize", _message(parts))


def _message(parts: list[StepRows]) -> StepDone:
    """The tokens of a sequence stand together, in order, so that its reader has them at once."""
    step, collected_at, slots, generations, indices, token_ids, reasons = parts[-1]
    if len(parts) > 1:
        slots, generations, indices, token_ids = map(np.concatenate, zip(*(part[2:6] for part in parts), strict=True))
        order = np.argsort(slots, kind="stable")
        slots, generations, indices, token_ids = slots[order], generations[order], indices[order], token_ids[order]
        reasons = np.frombuffer(b"".join(part.reasons for part in parts), np.uint8)[order].tobytes()
    return StepDone(
        step,
        collected_at,
        slots.astype("<u4").tobytes(),
        generations.astype("<u4").tobytes(),
        indices.astype("<u4").tobytes(),
        token_ids.astype("<i4").tobytes(),
        reasons,
    )
