"""Which pages hold which prefixes: a trie over pages of tokens.

A page is named by what it hangs on and by its own tokens, which is what a chain of page hashes says too. Here the chain
is the parent's own dictionary, and the dictionary compares tokens and not only their hashes, so two prefixes cannot be
taken for one another.

Source: RadixAttention, Zheng et al. 2024; automatic prefix caching in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .pages import TRASH_PAGE, PageLedgerError

Int32 = npt.NDArray[np.int32]

_MAX_TAILS = 16  # pages that are compared token by token for the end of a match, the latest first


@dataclass(slots=True, eq=False)
class PageNode:
    """A page of tokens after the pages of ``parent``, and where its keys and values are."""

    parent: PageNode | None  # None: this is a root, whose tokens are its salt
    tokens: bytes  # int32 [page_size]
    depth: int  # pages from the root to here
    page: int = TRASH_PAGE  # on the device, unless it is the trash page
    host_page: int | None = None
    children: dict[bytes, PageNode] = field(default_factory=dict)  # by their tokens
    state_row: int = 0  # of the snapshot at its end, if there is one; see states.py


class Match(NamedTuple):
    """The longest known prefix: whole pages, and perhaps the first tokens of one more."""

    nodes: list[PageNode]
    tail: PageNode | None = None
    num_tail_tokens: int = 0
    num_known_pages: int = 0  # where states are kept: of which only the nodes can be gone on from

    def num_tokens(self, page_size: int) -> int:
        return len(self.nodes) * page_size + self.num_tail_tokens

    @property
    def is_away(self) -> bool:
        """Whether some of it is on the host only."""
        tail_is_away = self.tail is not None and not self.tail.page
        return tail_is_away or any(not node.page for node in self.nodes)


NO_MATCH = Match([])


@dataclass(slots=True)
class PrefixIndex:
    """The pages with known content. A node is there as long as its content is on the device or on the host.

    Invariant: what a page on the device hangs on is on the device too.
    """

    page_size: int
    _roots: dict[str, PageNode] = field(default_factory=dict)  # by salt
    _by_page: dict[int, PageNode] = field(default_factory=dict)

    def match(self, tokens: Int32, salt: str) -> Match:
        """The longest prefix of ``tokens``. Its tail is only worth a copy if it saves half a page or ends the match."""
        parent = self._roots.get(salt)
        if parent is None:
            return NO_MATCH
        nodes: list[PageNode] = []
        size = self.page_size
        for start in range(0, len(tokens) - size + 1, size):
            node = parent.children.get(tokens[start : start + size].tobytes())
            if node is None:
                break
            nodes.append(node)
            parent = node
        rest = tokens[size * len(nodes) :][:size]
        tail, num_tail_tokens = _closest(parent, rest)
        if num_tail_tokens < min(len(rest), max(1, size // 2)):
            return Match(nodes)
        return Match(nodes, tail, num_tail_tokens)

    def add(self, parent: PageNode | None, salt: str, tokens: bytes) -> PageNode:
        """The node of this page under ``parent``, or under the root of ``salt``: the one there is, or a new one."""
        if parent is None:
            parent = self._roots.setdefault(salt, PageNode(None, salt.encode(), 0))
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = PageNode(parent, tokens, parent.depth + 1)
        return node

    def put(self, node: PageNode, page: int) -> None:
        """The content of ``node`` is in ``page``."""
        node.page = page
        self._by_page[page] = node

    def take(self, page: int) -> PageNode | None:
        """The node whose content was in ``page`` and no longer is."""
        node = self._by_page.pop(page, None)
        if node is not None:
            node.page = TRASH_PAGE
        return node

    def node_of(self, page: int) -> PageNode | None:
        return self._by_page.get(page)

    def remove(self, node: PageNode) -> list[PageNode]:
        """Forgets ``node`` and all that hangs on it; what was forgotten, which may still name pages."""
        parent = node.parent
        assert parent is not None, "a root is not removed"
        del parent.children[node.tokens]
        if parent.parent is None and not parent.children:
            del self._roots[parent.tokens.decode()]
        gone = list(_descend(node))
        for item in gone:
            self._by_page.pop(item.page, None)
        return gone

    def nodes(self) -> Iterator[PageNode]:
        """All of them, without the roots."""
        for root in self._roots.values():
            for child in root.children.values():
                yield from _descend(child)

    def check(self, idle_pages: list[int]) -> None:
        """Proves the invariant, and that idle pages are evicted from the end of their chains.

        Raises:
            PageLedgerError: names the first page for which that is not so.
        """
        order = {page: index for index, page in enumerate(idle_pages)}
        never = len(order)
        on_device = {node.page: node for node in self.nodes() if node.page}
        if on_device != self._by_page:
            raise PageLedgerError(f"pages {on_device.keys() ^ self._by_page.keys()} are not what the index says")
        for page, node in on_device.items():
            parent = node.parent
            if parent is None or parent.parent is None:
                continue
            if not parent.page:
                raise PageLedgerError(f"page {page} is on the device, and what it hangs on is not")
            if order.get(parent.page, never) < order.get(page, never):
                raise PageLedgerError(f"page {parent.page} would be evicted before page {page}, which hangs on it")


def _descend(node: PageNode) -> Iterator[PageNode]:
    stack = [node]
    while stack:
        item = stack.pop()
        stack.extend(item.children.values())
        yield item


def _closest(parent: PageNode, tokens: Int32) -> tuple[PageNode | None, int]:
    """The page under ``parent`` that has most of the first of ``tokens`` in common, and how many.

    Latest pages come first: whoever asks again most likely asks for what was just said.
    """
    best, most = None, 0
    if len(tokens):
        for node in islice(reversed(parent.children.values()), _MAX_TAILS):
            differs = np.frombuffer(node.tokens, np.int32)[: len(tokens)] != tokens
            num_equal = int(differs.argmax()) if differs.any() else len(tokens)
            if num_equal > most:
                best, most = node, num_equal
    return best, most
