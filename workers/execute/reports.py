"""What summarize hears of the steps: a message each, or one for several where steps are very short."""

from __future__ import annotations

import time

from ...protocol.channels import Links
from ...protocol.messages import StepDone

MIN_INTERVAL_S = 0.001  # between two messages, as long as steps are shorter than that


class Reports:
    """Messages on their way to summarize.

    One wakes a thread of ZeroMQ here, summarize, and each client that follows; where a step takes a tenth of a
    millisecond, that costs more than the step. Whether a message is held or lost, the journal has its tokens already.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._held: list[StepDone] = []
        self._next = 0.0

    def add(self, message: StepDone) -> None:
        self._held.append(message)

    def send(self, *, may_hold: bool = False) -> None:
        """Send what is there. ``may_hold``: not before the interval has passed; somebody will call again soon."""
        if not self._held:
            return
        now = time.monotonic()
        if may_hold and now < self._next:
            return
        self._next = now + MIN_INTERVAL_S
        held, self._held = self._held, []
        self._links.send("summarize", held[0] if len(held) == 1 else _joined(held))


def _joined(messages: list[StepDone]) -> StepDone:
    """The rows of all, in order."""
    last = messages[-1]
    return StepDone(
        last.step,
        last.finished_ns,
        b"".join(m.slots for m in messages),
        b"".join(m.generations for m in messages),
        b"".join(m.indices for m in messages),
        b"".join(m.token_ids for m in messages),
        b"".join(m.finish_reasons for m in messages),
    )
