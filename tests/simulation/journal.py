"""The journal in memory, with every store of a process counted, so that it can die before any of them, or within it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from triptych.protocol.intent import Intent
from triptych.protocol.journal.layout import HEADER, HEADER_BYTES, LAYOUT_VERSION, MAGIC, RECORD, Journal

if TYPE_CHECKING:
    from tests.simulation.processes import Process

VIEWS = ("arena", "words", "prepare_words", "tokens_words", "finish_words", "release_words")


def make_journal(num_records: int, arena_bytes: int, *, clock_shift_ns: int) -> Journal:
    """A journal in an anonymous file, which goes with its last view. Its clock may be ahead, as after a reboot."""
    file = os.memfd_create("journal", os.MFD_CLOEXEC)
    os.ftruncate(file, HEADER_BYTES + num_records * RECORD.itemsize + arena_bytes)
    header = np.zeros(1, HEADER)
    header[0] = (MAGIC, LAYOUT_VERSION, RECORD.itemsize, num_records, arena_bytes, 0, b"", 0, clock_shift_ns)
    os.pwrite(file, header.tobytes(), 0)
    return Journal(Path("journal"), file)


class Watched(np.ndarray[Any, Any]):
    """A view whose stores are acts of a process."""

    process: Process | None = None
    guard: Callable[[Any], None] | None = None  # is asked before a store, with its key

    def __array_finalize__(self, other: Any) -> None:
        self.process = getattr(other, "process", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.process is not None:
            self.process.act("store", lambda: self._torn(key, value))
        if self.guard is not None:
            self.guard(key)
        super().__setitem__(key, value)

    def put(self, indices: Any, values: Any, mode: Any = "raise") -> None:
        if self.process is not None:
            self.process.act("store", lambda: self._torn(indices, values))
        super().put(indices, values, mode)

    def _torn(self, key: Any, value: Any) -> None:
        """The beginning of a store of many words: each of them is stored whole, and not all at once."""
        assert self.process is not None, "somebody dies"
        plain = self.view(np.ndarray)
        if isinstance(key, np.ndarray) and isinstance(value, np.ndarray):
            cut = self.process.rng.randrange(len(key) + 1)
            plain[np.asarray(key)[:cut]] = value[:cut]
        elif isinstance(key, slice) and isinstance(value, (memoryview, np.ndarray)):
            start = key.start or 0
            cut = self.process.rng.randrange(len(value) + 1)
            plain[start : start + cut] = value[:cut]


class WatchedEntry:
    """One record, of which each field is stored alone."""

    __slots__ = ("_entry", "_process")

    def __init__(self, entry: Any, process: Process) -> None:
        self._entry, self._process = entry, process

    def __getitem__(self, name: str) -> Any:
        return self._entry[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._process.act("store")
        self._entry[name] = value


class WatchedRecords:
    def __init__(self, records: Any, process: Process) -> None:
        self._records, self._process = records, process

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return watched(self._records[key], self._process)
        self._process.act("load")
        return WatchedEntry(self._records[key], self._process)


class LifeJournal(Journal):
    """A journal as one life of one process has it mapped."""

    def __init__(self, journal: Journal, process: Process) -> None:
        self.__dict__.update(vars(journal))
        for name in VIEWS:
            setattr(self, name, watched(getattr(journal, name), process))
        if process.name.startswith("execute"):
            self.tokens_words.guard = process.world.checks.before_tokens  # type: ignore[attr-defined]
        self.records = WatchedRecords(journal.records, process)  # type: ignore[assignment]


class WatchedWords:
    """Words of which each store is an act."""

    def __init__(self, words: memoryview, process: Process) -> None:
        self._words, self._process = words, process

    def __getitem__(self, key: Any) -> Any:
        return self._words[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._process.act("store")
        self._words[key] = value


class LifeIntent(Intent):
    """An intent as one life of one process has it mapped."""

    def __init__(self, intent: Intent, process: Process) -> None:
        self._words = WatchedWords(intent._words, process)  # type: ignore[assignment]


def watched(array: Any, process: Process) -> Watched:
    view: Watched = array.view(Watched)
    view.process = process
    return view
