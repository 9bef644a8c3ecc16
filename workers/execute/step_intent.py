"""Records which requests are in the steps in flight, before these run; see ``protocol/intent.py``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ...protocol.intent import Intent
from ...protocol.record_key import number_of
from .scheduling.plan import Chunk, Plan
from .scheduling.rows import Rows
from .scheduling.sequence import Key


class _InFlight(NamedTuple):
    plan: Plan
    version: int  # of the rows when it was planned


class StepIntent:
    """Lists every request in the steps in flight. The rows are rewritten only after a sequence took or left one: a step
    with the same rows costs two stores, whatever their number.

    Invariant: at every moment, each request in a step that is not collected is in one of the two lists. So none is
    removed from one list before it is in the other.
    """

    def __init__(self, intent: Intent) -> None:
        self._intent = intent
        self._in_flight: deque[_InFlight] = deque()
        self._version = -1  # of the rows in the standing list
        self._has_others = False

    def begin(self, plan: Plan, rows: Rows, *, num_ahead: int = 0) -> None:
        """A step is about to be launched, perhaps behind others. ``num_ahead``: steps collected before it of which
        nothing is written yet.
        """
        others = [*plan.chunks[plan.num_decodes :]]
        for earlier in self._in_flight:
            # Its decodes are in the standing list, unless the rows have changed or the list was put to other use since.
            are_standing = earlier.version == rows.version == self._version
            others += earlier.plan.chunks[earlier.plan.num_decodes if are_standing else 0 :]
        self._in_flight.append(_InFlight(plan, rows.version))
        if others or self._has_others:
            self._has_others = bool(others)
            self._intent.set_others(_numbers(others))
        if rows.version != self._version:
            self._version = rows.version
            self._intent.set_standing([number_of(sequence.key) for sequence in rows.seated])
        self._intent.begin(num_ahead=num_ahead)

    def end(self) -> None:
        """The oldest step in flight completed without harm. Its rows stay listed as long as a step is in flight."""
        self._in_flight.popleft()
        if not self._in_flight:
            self._intent.end()

    def begin_one(self, key: Key) -> None:
        """A request is about to be adopted, outside of any step."""
        in_flight = [chunk for step in self._in_flight for chunk in step.plan.chunks]
        self._version, self._has_others = -1, True
        self._intent.set_others(_numbers(in_flight))
        self._intent.begin_one(number_of(key))

    def end_one(self) -> None:
        self._intent.set_standing([])
        if not self._in_flight:
            self._intent.end()


def _numbers(chunks: Iterable[Chunk]) -> list[int]:
    return [number_of(chunk.key) for chunk in chunks]
