"""Runs the requests that were in a step at an internal crash one by one, for some new tokens each, before all others.

If the process crashes again, only one request can be to blame. ``driver/blame.py`` keeps count.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from ...protocol.errors import JournalError
from ...protocol.journal.deaths import note_survival, num_ahead, suspects
from ...protocol.journal.layout import Journal
from ...protocol.journal.requests import RequestView, read_request, slots_of_group
from .scheduling.plan import Plan
from .scheduling.progress import Progress
from .scheduling.sequence import Key


class _Unit(NamedTuple):
    """Suspects that run together, apart from all other requests."""

    keys: list[Key]
    is_search: bool = False


_NOBODY = _Unit([])


class Quarantine:
    """The suspects of earlier crashes, in order of arrival. No other request is adopted while ``is_on``.

    They run one by one, except for the beams of a search, which take their steps together or not at all. Each runs for
    as many tokens as the crashed process may have been ahead of the journal, so that the fatal one is among them:
    ``num_steps``, for steps in flight and proposals, plus those that the process itself had noted before it died. A
    search runs to its end: it starts over, and how far it had come is unknown.
    """

    def __init__(self, journal: Journal, *, num_steps: int) -> None:
        self._journal = journal
        self._num_steps = num_steps
        self._num_left: float = 0  # steps that ``_current`` still has to take
        self._waiting = deque(_units(journal))
        self._chosen = _NOBODY  # may be adopted now
        self._current: set[Key] = set()

    @property
    def is_on(self) -> bool:
        return bool(self._current or self._waiting)

    @property
    def has_next(self) -> bool:
        """Whether a suspect can run now."""
        return bool(self._waiting and not self._current)

    def __len__(self) -> int:
        return sum(len(unit.keys) for unit in self._waiting) + len(self._current)

    def next_unit(self) -> list[Key]:
        """The suspects to adopt now; none while others are running. ``enter`` reports that they were adopted."""
        self._chosen = self._waiting.popleft() if self._waiting and not self._current else _NOBODY
        return self._chosen.keys

    def blocks(self, key: Key) -> bool:
        """Whether the request has to wait until all suspects are cleared.

        This includes a request that got the record of a suspect that was released in the meantime.
        """
        return self.is_on and key not in self._chosen.keys

    def enter(self, key: Key) -> None:
        """``key`` was adopted; ignored unless it was chosen."""
        if key in self._chosen.keys:
            self._current.add(key)
            num_steps = self._num_steps + num_ahead(self._journal, "execute", *key)
            self._num_left = math.inf if self._chosen.is_search else num_steps

    def observe(self, plan: Plan, progress: Progress) -> list[Key]:
        """The suspects now cleared, as they took their steps alone, or ended. They leave until all are cleared."""
        self._num_left -= not self._current.isdisjoint(plan.sampled)
        if self._num_left > 0 and not any(_has_ended(key, progress) for key in self._current):
            return []
        through, self._current = list(self._current), set()
        for key in through:
            note_survival(self._journal, "execute", *key)
        return through

    def forget(self, key: Key) -> bool:
        """The request was released; returns whether it was a suspect that is running."""
        was_current = key in self._current
        self._current.discard(key)
        return was_current


def _units(journal: Journal) -> list[_Unit]:
    """The suspects; those that can only run together form one unit."""
    units: dict[tuple[int, int], _Unit] = {}
    for slot in sorted(suspects(journal, "execute"), key=lambda slot: int(journal.records["arrival"][slot])):
        view = _read(journal, slot)
        if view is not None and view.record.params.is_beam_search:
            keys = [_key_of(journal, member) for member in slots_of_group(journal, view.group)]
            units[view.group] = _Unit(keys, is_search=True)
        else:
            units[slot, -1] = _Unit([_key_of(journal, slot)])
    return list(units.values())


def _key_of(journal: Journal, slot: int) -> Key:
    return slot, journal.generation(slot)


def _read(journal: Journal, slot: int) -> RequestView | None:
    try:
        return read_request(journal, slot)
    except JournalError:
        return None


def _has_ended(key: Key, progress: Progress) -> bool:
    return key in progress.finished or key in progress.failed or key in progress.expired
