"""What summarize hears of the steps: a message each, or one for several where steps are short."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...protocol.channels import Links
from ...protocol.messages import StepDone


class StepRows(NamedTuple):
    """What one step brought, a row a token or end; those of one sequence in order."""

    step: int
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
    compute, that is a good part of it. Whether a message is held or lost, the journal has its tokens already.
    """

    def __init__(self, links: Links, *, interval_ms: float) -> None:
        self._links = links
        self._interval_s = interval_ms / 1e3
        self._held: list[StepRows] = []
        self._due = 0.0  # until then what comes may be held

    def add(self, rows: StepRows) -> None:
        self._held.append(rows)

    def send(self, *, next_in_s: float = math.inf) -> None:
        """Send what is there, unless somebody will call again in ``next_in_s``, and that is before the interval is
        over: so nobody hears of a token later than the interval after it was known.
        """
        if not self._held:
            return
        now = time.monotonic()
        if now + next_in_s < self._due:
            return
        self._due = now + self._interval_s
        held, self._held = self._held, []
        self._links.send("summarize", _message(held))


def _message(held: list[StepRows]) -> StepDone:
    """The rows of all; the tokens of a sequence stand together, in order, so that its reader has them at once."""
    _, _, slots, generations, indices, token_ids, reasons = rows = held[-1]
    if len(held) > 1:
        slots, generations, indices, token_ids = map(np.concatenate, zip(*(each[2:6] for each in held), strict=True))
        order = np.argsort(slots, kind="stable")
        slots, generations, indices, token_ids = slots[order], generations[order], indices[order], token_ids[order]
        reasons = np.frombuffer(b"".join(each.reasons for each in held), np.uint8)[order].tobytes()
    return StepDone(
        rows.step,
        rows.collected_at,
        slots.astype("<u4").tobytes(),
        generations.astype("<u4").tobytes(),
        indices.astype("<u4").tobytes(),
        token_ids.astype("<i4").tobytes(),
        reasons,
    )
