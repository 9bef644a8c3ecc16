"""Finds stop strings in a text that arrives in pieces, as soon as their last character is there."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple


class Scan(NamedTuple):
    """What a ``StopMatcher`` lets out of a piece of text."""

    text: str  # may be shown: contains no part of a stop string (except a match that is to be included)
    stop: str | None  # the stop string that ended the text


class StopMatcher:
    """Searches the text of one request for a few strings, and holds back only what may be the start of one.

    The match whose last character comes first wins, and among those that end there the longest: so the result does not
    depend on how the text was cut into pieces. Each character is processed once, however often matches start and fail.

    Source: Aho and Corasick 1975.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop_str: bool = False) -> None:
        self._include_stop_str = include_stop_str
        self._root = _automaton(stops)
        self._node = self._root
        self._held = ""  # the last node.depth characters

    def push(self, text: str, *, may_end: bool = True) -> Scan:
        """The text that may be shown, and the stop string found in it. Nothing may be pushed after a match.

        Without ``may_end``, a stop string that ends in this text is none; one that only begins there may be.
        """
        if self._node is self._root and self._root.children.keys().isdisjoint(text):
            return Scan(text, None)
        seen = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._node = self._node.next(character)
            if self._node.stop is not None:
                if may_end:
                    return self._matched(seen[:end], self._node.stop)
                self._node = self._node.unfinished
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
    """The longest prefix of a stop string that the text ends with; it has ``depth`` characters."""

    depth: int = 0
    children: dict[str, _Node] = field(default_factory=dict)
    shorter: _Node | None = None  # the next shorter such prefix (the failure link)
    stop: str | None = None  # the longest stop string that the text ends with

    @property
    def unfinished(self) -> _Node:
        """The longest such prefix that is not all of its stop string."""
        node = self
        while not node.children and node.shorter is not None:
            node = node.shorter
        return node

    def next(self, character: str) -> _Node:
        node = self
        while character not in node.children:
            if node.shorter is None:
                return node
            node = node.shorter
        return node.children[character]


@lru_cache(maxsize=32)  # requests of one client mostly share their stop strings; at worst a megabyte each
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
    """Set ``shorter`` and inherited stops, breadth first, as a node depends on shorter ones."""
    level = [root]
    while level:
        for node in level:
            for character, child in node.children.items():
                child.shorter = root if node.shorter is None else node.shorter.next(character)
                child.stop = child.stop or child.shorter.stop
        level = [child for node in level for child in node.children.values()]
