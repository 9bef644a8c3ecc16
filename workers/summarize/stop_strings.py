"""Stop strings in a text that arrives in pieces, found as soon as their last character is there."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple


class Scan(NamedTuple):
    text: str  # what may be shown: no stop string begins in it (but the one found, if it is to be included)
    stop: str | None  # the stop string that ended the text


class StopMatcher:
    """Looks for a few strings in the text of one request and holds back only what may be the beginning of one.

    The match whose last character comes first wins, the longest of those that end there: so the result does not depend
    on how the text was cut into pieces. Each character is looked at once, however often matches begin and fail.

    Source: Aho and Corasick 1975.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop_str: bool = False) -> None:
        self._include_stop_str = include_stop_str
        self._root = _automaton(stops)
        self._node = self._root
        self._held = ""  # the last node.depth characters

    def push(self, text: str) -> Scan:
        """The text that is free to go, and the stop string found in it. Nothing may be pushed after a match."""
        if self._node is self._root and self._root.children.keys().isdisjoint(text):
            return Scan(text, None)
        seen = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._node = self._node.next(character)
            if self._node.stop is not None:
                return self._matched(seen[:end], self._node.stop)
        num_free = len(seen) - self._node.depth
        self._held = seen[num_free:]
        return Scan(seen[:num_free], None)

    def flush(self) -> str:
        """What was held back, now that no more text follows."""
        held, self._held, self._node = self._held, "", self._root
        return held

    def _matched(self, seen: str, stop: str) -> Scan:
        self._held, self._node = "", self._root
        return Scan(seen if self._include_stop_str else seen.removesuffix(stop), stop)


@dataclass(slots=True, eq=False)
class _Node:
    """The longest beginning of a stop string that the text ends with. ``depth`` characters long."""

    depth: int = 0
    children: dict[str, _Node] = field(default_factory=dict)
    shorter: _Node | None = None  # the next shorter beginning of any stop string that the text also ends with
    stop: str | None = None  # the longest stop string that the text ends with

    def next(self, character: str) -> _Node:
        node = self
        while character not in node.children:
            if node.shorter is None:
                return node
            node = node.shorter
        return node.children[character]


@lru_cache(maxsize=32)  # requests of one client mostly share their stop strings; a megabyte each at worst
def _automaton(stops: tuple[str, ...]) -> _Node:
    root = _Node()
    for stop in stops:
        node = root
        for character in stop:
            node = node.children.setdefault(character, _Node(node.depth + 1))
        node.stop = stop
    _link(root)
    return root


def _link(root: _Node) -> None:
    """Set ``shorter`` and inherited stops, level by level, so that what a node needs is set before it."""
    level = [root]
    while level:
        for node in level:
            for character, child in node.children.items():
                child.shorter = root if node.shorter is None else node.shorter.next(character)
                child.stop = child.stop or child.shorter.stop
        level = [child for node in level for child in node.children.values()]
