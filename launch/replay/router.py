"""Assigns requests to replicas."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from ...protocol.arrays import Int32
from ...protocol.errors import ConfigError

_MAX_PREFIXES = 1 << 17  # remembered
_MOST_LOAD = 2.0  # of a replica that has a prefix, relative to the least loaded; above it another one gets the request


class Router(Protocol):
    """Sees requests in the order of their arrival."""

    def choose(self, tokens: Int32, salt: str, loads: Sequence[int]) -> int:
        """The index of a replica. ``loads``: the number of unfinished requests of each."""
        ...


class RoundRobin:
    """Each replica in turn."""

    def __init__(self, page_size: int) -> None:
        self._next = 0

    def choose(self, tokens: Int32, salt: str, loads: Sequence[int]) -> int:
        index, self._next = self._next, (self._next + 1) % len(loads)
        return index


class LeastQueue:
    """The replica with the fewest requests; the first of several."""

    def __init__(self, page_size: int) -> None:
        pass

    def choose(self, tokens: Int32, salt: str, loads: Sequence[int]) -> int:
        return min(range(len(loads)), key=lambda index: loads[index])


class PrefixAffinity:
    """The replica that was last sent the longest prefix of the prompt, unless it has far more load than another."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._sent_to: OrderedDict[int, int] = OrderedDict()  # hash of the first pages -> replica

    def choose(self, tokens: Int32, salt: str, loads: Sequence[int]) -> int:
        prefixes = self._prefixes(tokens, salt)
        least = min(range(len(loads)), key=lambda index: loads[index])
        known = next((self._sent_to[prefix] for prefix in reversed(prefixes) if prefix in self._sent_to), least)
        chosen = known if loads[known] <= _MOST_LOAD * loads[least] + 1 else least
        for prefix in prefixes:
            self._sent_to[prefix] = chosen
            self._sent_to.move_to_end(prefix)
        while len(self._sent_to) > _MAX_PREFIXES:
            self._sent_to.popitem(last=False)
        return chosen

    def _prefixes(self, tokens: Int32, salt: str) -> list[int]:
        prefixes, size = [hash(salt)], self._page_size
        for start in range(0, len(tokens) - size + 1, size):
            prefixes.append(hash((prefixes[-1], tokens[start : start + size].tobytes())))
        return prefixes[1:]


ROUTERS: dict[str, Callable[[int], Router]] = {
    "round_robin": RoundRobin,
    "least_queue": LeastQueue,
    "prefix_affinity": PrefixAffinity,
}


def make_router(name: str, page_size: int) -> Router:
    if name not in ROUTERS:
        raise ConfigError(f"router is {name!r}, known are: {', '.join(ROUTERS)}", param="router")
    return ROUTERS[name](page_size)
