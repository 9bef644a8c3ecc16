"""Wraps the journal's views to simulate a process that dies between two stores or whose stores are reordered."""

from __future__ import annotations

from typing import Any

import numpy as np

from triptych.protocol.journal.layout import ALL, Journal, SomeOrAll

VIEWS = ("header", "records", "arena", "words", "prepare_words", "tokens_words", "finish_words", "release_words")


class Died(BaseException):
    """Derived from BaseException: like a kill, it must not be caught by any handler on the way."""


class StoreCounter:
    """Counts the stores of one process; raises Died before store number ``end``, or drops store number ``lost``."""

    def __init__(self, *, end: int | None = None, lost: int | None = None) -> None:
        self.num_stores = 0
        self.end, self._lost = end, lost

    def stores(self) -> bool:
        """Whether the next store reaches memory."""
        number, self.num_stores = self.num_stores, self.num_stores + 1
        if number == self.end:
            raise Died
        return number != self._lost


class _View:
    def __init__(self, counter: StoreCounter, target: Any) -> None:
        self._counter, self._target = counter, target

    def __getitem__(self, key: Any) -> Any:
        value = self._target[key]
        shares = isinstance(value, np.void) or (isinstance(value, np.ndarray) and value.base is not None)
        return _View(self._counter, value) if shares else value

    def put(self, indices: Any, values: Any) -> None:
        if self._counter.stores():
            self._target.put(indices, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._counter.stores():
            self._target[key] = value


class MortalJournal(Journal):
    """A journal whose stores are counted by ``counter``. Reads go to the wrapped journal, ``whole``."""

    def __init__(self, journal: Journal, counter: StoreCounter) -> None:
        self.__dict__.update(vars(journal))
        self.whole = journal
        for name in VIEWS:
            setattr(self, name, _View(counter, getattr(journal, name)))

    def generations(self, slots: SomeOrAll = ALL) -> Any:
        return self.whole.generations(slots)

    def states(self, slots: SomeOrAll = ALL) -> Any:
        return self.whole.states(slots)
