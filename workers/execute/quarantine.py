"""After a crash of our own making: whoever was in the step runs alone first, one new token each, before anyone joins.

If the process dies of it again, only one request can be to blame. See ``driver/blame.py`` for who keeps count.
"""

from __future__ import annotations

from collections import deque

from ...protocol.intent import Intent
from ...protocol.journal.deaths import note_survival, suspects
from ...protocol.journal.layout import Journal
from .scheduling.plan import Plan
from .scheduling.progress import Progress
from .scheduling.rows import Rows
from .scheduling.sequence import Key


class Quarantine:
    """The suspects of earlier lives, in order of arrival. Nobody else is adopted while ``is_on``."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        slots = sorted(suspects(journal, "execute"), key=lambda slot: int(journal.records["arrival"][slot]))
        self._waiting = deque(slots)
        self._chosen: int | None = None  # the slot that may be adopted now
        self._current: Key | None = None

    @property
    def is_on(self) -> bool:
        return self._current is not None or bool(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting) + (self._current is not None)

    def next_slot(self) -> int | None:
        """Whom to adopt now, if nobody is under way; ``enter`` says that it was."""
        self._chosen = self._waiting.popleft() if self._current is None and self._waiting else None
        return self._chosen

    def blocks(self, slot: int) -> bool:
        """Whether the request has to wait until all suspects have come through."""
        return self.is_on and slot != self._chosen

    def enter(self, key: Key) -> None:
        self._current = key

    def observe(self, progress: Progress) -> Key | None:
        """The one that has come through: it got a token alone, or ended otherwise. It leaves until all have."""
        key = self._current
        if key is None or not (key in progress.keys or _has_ended(key, progress)):
            return None
        note_survival(self._journal, "execute", *key)
        self._current = None
        return key

    def forget(self, key: Key) -> bool:
        """It was released meanwhile; whether it was the one under way."""
        was_current = key == self._current
        if was_current:
            self._current = None
        return was_current


def _has_ended(key: Key, progress: Progress) -> bool:
    return key in progress.finished or key in progress.failed or key in progress.expired


class StepIntent:
    """Publishes the sequences of a step before it runs. The rows are written again only when somebody sat down or left:
    a step of the same rows costs two stores, whatever their number.
    """

    def __init__(self, intent: Intent) -> None:
        self._intent = intent
        self._version = -1
        self._has_others = False

    def begin(self, plan: Plan, rows: Rows) -> None:
        if rows.version != self._version:
            self._version = rows.version
            self._intent.set_standing([_number(sequence.key) for sequence in rows.seated])
        others = plan.chunks[plan.num_decodes :]
        if others or self._has_others:
            self._has_others = bool(others)
            self._intent.set_others([_number(chunk.key) for chunk in others])
        self._intent.begin()

    def begin_one(self, key: Key) -> None:
        self._version, self._has_others = -1, True
        self._intent.clear()
        self._intent.begin_one(_number(key))

    def end(self) -> None:
        self._intent.end()


def _number(key: Key) -> int:
    return key[0] << 32 | key[1]
