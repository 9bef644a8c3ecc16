"""Where the pages of finished sequences wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .pages import PagePool
from .sequence import Key


@dataclass(slots=True)
class _Entry:
    pages: list[int]
    last_step: int  # number of the last step that touches them
    is_released: bool = False


class Limbo:
    """Pages that nobody computes with any more.

    They go back to the pool once the sequence was released *and* the last step that touched them has completed. Until
    the release they are kept for bookkeeping only, so a lost release costs nothing: under pressure they are taken.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._entries: dict[Key, _Entry] = {}  # oldest first
        self._completed_step = 0

    @property
    def num_entries(self) -> int:
        """Pages in the tables that are here, shared ones as often as they are shared."""
        return sum(len(entry.pages) for entry in self._entries.values())

    @property
    def num_pages(self) -> int:
        """Pages that nobody else holds."""
        return len(self._unshared(self._entries.values()))

    @property
    def num_reclaimable(self) -> int:
        return len(self.reclaimable())

    def reclaimable(self) -> set[int]:
        """Pages that ``reclaim`` could make available: those that nobody else holds."""
        if not self._entries:
            return set()
        return self._unshared(entry for entry in self._entries.values() if self._is_over(entry))

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def table(self, key: Key) -> list[int]:
        """The pages of ``key``, with all that it had computed; none if they were taken, or never came here."""
        entry = self._entries.get(key)
        return entry.pages if entry else []

    def tables(self) -> Iterator[list[int]]:
        return (entry.pages for entry in self._entries.values())

    def put(self, key: Key, pages: list[int], last_step: int) -> None:
        assert key not in self._entries, f"{key} is in limbo already"
        self._entries[key] = _Entry(pages, last_step)

    def release(self, key: Key) -> None:
        """The pages of ``key`` are not wanted any more. A second release, or one of an unknown key, changes nothing."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.is_released = True
        if self._is_over(entry):
            self._free(key)

    def complete(self, step: int) -> None:
        """Steps up to ``step`` have completed."""
        self._completed_step = step
        for key in [key for key, entry in self._entries.items() if entry.is_released and self._is_over(entry)]:
            self._free(key)

    def reclaim(self, num_pages: int) -> None:
        """Takes pages without waiting for their release, oldest first, until so many are available or none is left."""
        for key in [key for key, entry in self._entries.items() if self._is_over(entry)]:
            if self._pool.num_available >= num_pages:
                return
            self._free(key)

    def _unshared(self, entries: Iterable[_Entry]) -> set[int]:
        """Pages that only these hold."""
        counts = Counter(page for entry in entries for page in entry.pages)
        return {page for page, count in counts.items() if count == self._pool.refs(page)}

    def _is_over(self, entry: _Entry) -> bool:
        return entry.last_step <= self._completed_step

    def _free(self, key: Key) -> None:
        self._pool.free(self._entries.pop(key).pages)
