"""What a worker is about to touch, written down before it does: if it dies of it, the driver knows of what.

Two lists, because the greater part of a batch stays the same from step to step: then a step costs two stores. One
worker writes; the driver reads when that worker is dead.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable

MAX_KEYS = 16_384  # of each list; of a greater batch the rest is not suspected
_WORD = 8
_LIST_WORDS = 1 + MAX_KEYS
INTENT_BYTES = _WORD * (1 + 2 * _LIST_WORDS + 5)


class Intent:
    """The intent of one worker: numbers of 64 bits, whatever they name."""

    def __init__(self, mapped: mmap.mmap, offset: int) -> None:
        self._all = memoryview(mapped)
        self._words = self._all[offset : offset + INTENT_BYTES].cast("Q")

    def set_standing(self, keys: Iterable[int]) -> None:
        """Those of this and the following undertakings."""
        self._write(1, keys)

    def set_others(self, keys: Iterable[int]) -> None:
        """Those besides; they too stay until the next call."""
        self._write(1 + _LIST_WORDS, keys)

    def begin(self, *, num_ahead: int = 0) -> None:
        """``num_ahead``: undertakings that came to their end, and that nothing is written of yet: after a death they
        are done again before this one is.
        """
        self._words[0] = 1 + num_ahead

    def end(self) -> None:
        """What was begun did no harm."""
        self._words[0] = 0

    def begin_one(self, key: int) -> None:
        """``set_standing([key])`` and ``begin`` in two stores, for who always works on one thing alone."""
        self._words[2] = key
        self._words[1] = 1
        self._words[0] = 1

    def read(self) -> list[int]:
        """What was being worked on, each once; empty between two undertakings."""
        if not self._words[0]:
            return []
        return list(dict.fromkeys([*self._read(1), *self._read(1 + _LIST_WORDS)]))

    @property
    def num_ahead(self) -> int:
        """As it was told when this began."""
        return max(self._words[0] - 1, 0)

    def clear(self) -> None:
        self._words[0] = self._words[1] = self._words[1 + _LIST_WORDS] = 0

    def _write(self, at: int, keys: Iterable[int]) -> None:
        words = array("Q", keys)[:MAX_KEYS]
        self._words[at + 1 : at + 1 + len(words)] = memoryview(words)
        self._words[at] = len(words)

    def _read(self, at: int) -> list[int]:
        count = min(self._words[at], MAX_KEYS)
        return self._words[at + 1 : at + 1 + count].tolist()

    def close(self) -> None:
        self._words.release()
        self._all.release()
