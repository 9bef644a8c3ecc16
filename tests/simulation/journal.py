"""The journal in memory: every store of a process is counted, and it can die before or during any of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from triptych.protocol.board import Board
from triptych.protocol.intent import Intent
from triptych.protocol.journal.layout import HEADER, HEADER_BYTES, LAYOUT_VERSION, MAGIC, RECORD, Journal

if TYPE_CHECKING:
    from tests.simulation.processes import Process

VIEWS = ("arena", "words", "prepare_words", "tokens_words", "finish_words", "release_words")


def make_journal(num_records: int, arena_bytes: int, *, clock_shift_ns: int) -> Journal:
    """A journal in an anonymous file, freed with its last view. Its clock may be ahead, as after a reboot."""
    file = os.memfd_create("journal", os.MFD_CLOEXEC)
    os.ftruncate(file, HEADER_BYTES + num_records * RECORD.itemsize + arena_bytes)
    header = np.zeros(1, HEADER)
    header[0] = (MAGIC, LAYOUT_VERSION, RECORD.itemsize, num_records, arena_bytes, 0, b"", 0, clock_shift_ns, 0)
    os.pwrite(file, header.tobytes(), 0)
    return Journal(Path("journal"), file)


def make_board() -> Board:
    """A board in an anonymous file."""
    file = os.memfd_create("board", os.MFD_CLOEXEC)
    try:
        return Board(Path(f"/proc/self/fd/{file}"))
    finally:
        os.close(file)


class Watched(np.ndarray[Any, Any]):
    """A view whose stores are acts of a process. Values read from it are plain copies."""

    process: Process
    to_read: npt.NDArray[Any]  # the same memory
    to_write: npt.NDArray[Any]
    guard: Callable[[Any], None] | None = None  # called before a store, with its key

    def __getitem__(self, key: Any) -> Any:
        return self.to_read[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.process.act("store", lambda: self._torn(key, value))
        if self.guard is not None:
            self.guard(key)
        self.to_write[key] = value

    def put(self, indices: Any, values: Any, mode: Any = "raise") -> None:
        self.process.act("store", lambda: self._torn(indices, values))
        self.to_write.put(indices, values, mode)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(*[i.to_read if isinstance(i, Watched) else i for i in inputs], **options)

    def _torn(self, key: Any, value: Any) -> None:
        """The beginning of a store of many words: each word is stored completely, but not all of them."""
        if isinstance(key, np.ndarray) and isinstance(value, np.ndarray):
            cut = self.process.rng.randrange(len(key) + 1)
            self.to_write[np.asarray(key)[:cut]] = value[:cut]
        elif isinstance(key, slice) and isinstance(value, (memoryview, np.ndarray)):
            start = key.start or 0
            cut = self.process.rng.randrange(len(value) + 1)
            self.to_write[start : start + cut] = value[:cut]


class WatchedEntry:
    """One record, whose fields are stored one by one."""

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


class ProcessJournal(Journal):
    """A journal as mapped by one process."""

    def __init__(self, journal: Journal, process: Process) -> None:
        self.__dict__.update(vars(journal))
        # Reading is not an act, and arrays derived from watched ones would be watched too.
        self.generations, self.states = journal.generations, journal.states  # type: ignore[method-assign]
        self.release_states = journal.release_states  # type: ignore[method-assign]
        for name in VIEWS:
            setattr(self, name, watched(getattr(journal, name), process))
        if process.name.startswith("execute"):
            self.tokens_words.guard = process.world.checks.before_tokens  # type: ignore[attr-defined]
        self.records = WatchedRecords(journal.records, process)  # type: ignore[assignment]
        self._process = process

    def flush(self) -> None:
        self._process.act("flush")
        self._process.world.disk.flush()


class WatchedWords:
    """Words, each store into which is an act."""

    def __init__(self, words: memoryview, process: Process) -> None:
        self._words, self._process = words, process

    def __getitem__(self, key: Any) -> Any:
        return self._words[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._process.act("store")
        self._words[key] = value


class ProcessIntent(Intent):
    """An intent as mapped by one process."""

    def __init__(self, intent: Intent, process: Process) -> None:
        self._words = WatchedWords(intent._words, process)  # type: ignore[assignment]


def watched(array: Any, process: Process) -> Watched:
    view: Watched = array.view(Watched)
    view.process, view.to_write, view.to_read = process, array, array.view()
    view.to_read.flags.writeable = False
    return view
