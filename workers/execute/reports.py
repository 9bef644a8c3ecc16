"""Reports of steps to summarize: one message per step, or per several steps if these are short."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...protocol.channels import Links
from ...protocol.messages import StepDone


class StepRows(NamedTuple):
    """The results of steps, one row per token or end; those of one sequence are in order."""

    slots: npt.NDArray[np.int64]  # [n], like all columns
    generations: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]
    reasons: bytes  # indices into FINISH_REASONS


class Reports:
    """Sends messages to summarize.

    Each message wakes a ZeroMQ thread here, summarize, and every client that follows, and its rows cost each of them
    about as much as tokens do: where a step takes less than a few milliseconds, and the same processors report and
    compute, that is a considerable part of the step.
    """

    def __init__(self, links: Links, *, interval_ms: float) -> None:
        self._links = links
        self._interval_s = interval_ms / 1e3
        self._due = 0.0  # end of the interval since the last message

    def may_wait(self, next_in_s: float) -> bool:
        """Whether the present rows can wait ``next_in_s`` seconds and be sent along with the next ones: the interval is
        not over by then, so no token is reported later than one interval after it was known.
        """
        return time.monotonic() + next_in_s < self._due

    def send(self, parts: list[StepRows]) -> None:
        """Send the rows of all parts. The message may get lost, as the journal already has them."""
        self._due = time.monotonic() + self._interval_s
        self._links.send("summarize", _message(parts))


def _message(parts: list[StepRows]) -> StepDone:
    """One message. The tokens of each sequence are consecutive and in order, so that its reader has them at once."""
    slots, generations, indices, token_ids, reasons = parts[-1]
    if len(parts) > 1:
        slots, generations, indices, token_ids = map(np.concatenate, zip(*(part[:4] for part in parts), strict=True))
        order = np.argsort(slots, kind="stable")
        slots, generations, indices, token_ids = slots[order], generations[order], indices[order], token_ids[order]
        reasons = np.frombuffer(b"".join(part.reasons for part in parts), np.uint8)[order].tobytes()
    return StepDone(
        slots.astype("<u4").tobytes(),
        generations.astype("<u4").tobytes(),
        indices.astype("<u4").tobytes(),
        token_ids.astype("<i4").tobytes(),
        reasons,
    )
