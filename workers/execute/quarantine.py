"""After a crash of our own making: whoever was in a step runs alone first, some new tokens each, before anyone joins.

If the process dies of it again, only one request can be to blame. See ``driver/blame.py`` for who keeps count.
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
    """Suspects that run alone together."""

    keys: list[Key]
    is_search: bool = False


_NOBODY = _Unit([])


class Quarantine:
    """The suspects of earlier lives, in order of arrival. Nobody else is adopted while ``is_on``.

    They come one by one, but for the beams of a search, which take their steps together or not at all. Each takes
    as many tokens as the last life may have been ahead of what it had written, so that the one that killed is among
    them: ``num_steps`` for those in flight and for guesses, and those that the life itself has told of before it died.
    A search goes on to its end: it began anew, and nobody knows how far it was.
    """

    def __init__(self, journal: Journal, *, num_steps: int) -> None:
        self._journal = journal
        self._num_steps = num_steps
        self._num_left: float = 0  # of them, for those under way
        self._waiting = deque(_units(journal))
        self._chosen = _NOBODY  # who may be adopted now
        self._current: set[Key] = set()

    @property
    def is_on(self) -> bool:
        return bool(self._current or self._waiting)

    @property
    def has_next(self) -> bool:
        """Whether somebody can be tried now."""
        return bool(self._waiting and not self._current)

    def __len__(self) -> int:
        return sum(len(unit.keys) for unit in self._waiting) + len(self._current)

    def next_unit(self) -> list[Key]:
        """Whom to adopt now, if nobody is under way; ``enter`` says that it was."""
        self._chosen = self._waiting.popleft() if self._waiting and not self._current else _NOBODY
        return self._chosen.keys

    def blocks(self, key: Key) -> bool:
        """Whether the request has to wait until all suspects have come through.

        So has one that got the record of a suspect which was released meanwhile.
        """
        return self.is_on and key not in self._chosen.keys

    def enter(self, key: Key) -> None:
        """``key`` was adopted; of interest only if it was chosen."""
        if key in self._chosen.keys:
            self._current.add(key)
            num_steps = self._num_steps + num_ahead(self._journal, "execute", *key)
            self._num_left = math.inf if self._chosen.is_search else num_steps

    def observe(self, plan: Plan, progress: Progress) -> list[Key]:
        """Those that have come through: they took their steps alone, or ended. They leave until all have."""
        self._num_left -= not self._current.isdisjoint(plan.sampled)
        if self._num_left > 0 and not any(_has_ended(key, progress) for key in self._current):
            return []
        through, self._current = list(self._current), set()
        for key in through:
            note_survival(self._journal, "execute", *key)
        return through

    def forget(self, key: Key) -> bool:
        """It was released meanwhile; whether it was one of those under way."""
        was_current = key in self._current
        self._current.discard(key)
        return was_current


def _units(journal: Journal) -> list[_Unit]:
    """The suspects, those together that cannot run without each other."""
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
