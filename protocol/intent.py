"""Write-ahead marks of what a worker is about to touch: if it dies, the driver knows which requests were involved.

Two lists, because most of a batch stays the same from step to step: such a step costs two stores. The worker writes;
the driver reads once that worker is dead.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable

MAX_KEYS = 16_384  # per list; the rest of a larger batch is not suspected
_WORD = 8
_LIST_WORDS = 1 + MAX_KEYS
INTENT_BYTES = _WORD * (1 + 2 * _LIST_WORDS + 5)


class Intent:
    """The intent of one worker: 64-bit keys, whatever they stand for."""

    def __init__(self, mapped: mmap.mmap, offset: int) -> None:
        self._all = memoryview(mapped)
        self._words = self._all[offset : offset + INTENT_BYTES].cast("Q")

    def set_standing(self, keys: Iterable[int]) -> None:
        """The keys of this and the following units of work."""
        self._write(1, keys)

    def set_others(self, keys: Iterable[int]) -> None:
        """Additional keys; these too stay until the next call."""
        self._write(1 + _LIST_WORDS, keys)

    def begin(self, *, num_ahead: int = 0) -> None:
        """Start a unit of work. ``num_ahead``: earlier units that completed but whose results are not yet in the
        journal; after a crash they are repeated before this one.
        """
        self._words[0] = 1 + num_ahead

    def end(self) -> None:
        """The unit of work completed without harm."""
        self._words[0] = 0

    def begin_one(self, key: int) -> None:
        """``set_standing([key])`` and ``begin`` in three stores, for a worker that handles one item at a time."""
        self._words[2] = key
        self._words[1] = 1
        self._words[0] = 1

    def read(self) -> list[int]:
        """Keys of the unit in progress, without duplicates; empty between two units."""
        if not self._words[0]:
            return []
        return list(dict.fromkeys([*self._read(1), *self._read(1 + _LIST_WORDS)]))

    @property
    def num_ahead(self) -> int:
        """As passed to ``begin``."""
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
