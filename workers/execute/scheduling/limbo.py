"""The pages of finished sequences, until they can be reused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .pages import PagePool
from .sequence import Key


@dataclass(slots=True)
class _Entry:
    pages: list[int]
    last_step: int  # number of the last step that touches the pages
    is_released: bool = False


class Limbo:
    """Pages of sequences that have finished.

    They return to the pool once the sequence is released *and* the last step that touches them has completed. Before
    the release they are kept for bookkeeping only, so a lost release costs nothing: they are reclaimed when needed.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._entries: dict[Key, _Entry] = {}  # oldest first
        self._completed_step = 0

    @property
    def num_entries(self) -> int:
        """Entries in the block tables kept here; a shared page counts once per table."""
        return sum(len(entry.pages) for entry in self._entries.values())

    @property
    def num_pages(self) -> int:
        """Pages that are held by nothing else."""
        return len(self._unshared(self._entries.values()))

    def reclaimable(self) -> set[int]:
        """Pages that ``reclaim`` could make available."""
        if not self._entries:
            return set()
        return self._unshared(entry for entry in self._entries.values() if self._is_over(entry))

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def table(self, key: Key) -> list[int]:
        """The pages of ``key`` with everything it computed; empty if they were reclaimed or never put here."""
        entry = self._entries.get(key)
        return entry.pages if entry else []

    def tables(self) -> Iterator[list[int]]:
        return (entry.pages for entry in self._entries.values())

    def put(self, key: Key, pages: list[int], last_step: int) -> None:
        assert key not in self._entries, f"{key} is already in limbo"
        self._entries[key] = _Entry(pages, last_step)

    def release(self, key: Key) -> None:
        """The pages of ``key`` are no longer needed. Idempotent; ignores unknown keys."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.is_released = True
        if self._is_over(entry):
            self._free(key)

    def complete(self, step: int) -> None:
        """All steps up to ``step`` have completed."""
        self._completed_step = step
        for key in [key for key, entry in self._entries.items() if entry.is_released and self._is_over(entry)]:
            self._free(key)

    def reclaim(self, num_pages: int) -> None:
        """Free pages without waiting for their release, oldest first, until enough are available or none is left."""
        for key in [key for key, entry in self._entries.items() if self._is_over(entry)]:
            if self._pool.num_available >= num_pages:
                return
            self._free(key)

    def _unshared(self, entries: Iterable[_Entry]) -> set[int]:
        """Pages that only these entries hold."""
        counts = Counter(page for entry in entries for page in entry.pages)
        return {page for page, count in counts.items() if count == self._pool.refs(page)}

    def _is_over(self, entry: _Entry) -> bool:
        return entry.last_step <= self._completed_step

    def _free(self, key: Key) -> None:
        self._pool.free(self._entries.pop(key).pages)
