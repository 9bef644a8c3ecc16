"""Which pages hold which prefixes: a trie over pages of tokens.

A page is identified by its parent and its own tokens, as in a chain of page hashes. Here the chain is the parent's own
dictionary, which compares tokens and not only their hashes, so two prefixes can never be confused.

Source: RadixAttention, Zheng et al. 2024; automatic prefix caching in vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from ....protocol.arrays import Int32
from .pages import TRASH_PAGE, PageLedgerError

ROOT_KEY_BYTES = 16
_MAX_TAILS = 16  # pages compared token by token at the end of a match, the latest first


@lru_cache(maxsize=1024)
def root_key(salt: str) -> bytes:
    """What the prefixes of a salt begin with: a cryptographic hash, as clients choose salts. [ROOT_KEY_BYTES]"""
    return hashlib.blake2b(salt.encode(), digest_size=ROOT_KEY_BYTES).digest()


@dataclass(slots=True, eq=False)
class PageNode:
    """A page of tokens that follows the pages of ``parent``, and where its keys and values are."""

    parent: PageNode | None  # None: a root, whose tokens are its key
    tokens: bytes  # int32 [page_size]
    depth: int  # pages from the root up to this one
    page: int = TRASH_PAGE  # on the device, unless it is the trash page
    host_page: int | None = None
    children: dict[bytes, PageNode] = field(default_factory=dict)  # by their tokens
    state_row: int = 0  # of the state snapshot at its end, if there is one; see states.py


class Match(NamedTuple):
    """The longest cached prefix: whole pages, and possibly the first tokens of one more."""

    nodes: list[PageNode]
    tail: PageNode | None = None
    num_tail_tokens: int = 0
    num_known_pages: int = 0  # with recurrent layers: matching pages, of which only ``nodes`` can be continued from

    def num_tokens(self, page_size: int) -> int:
        return len(self.nodes) * page_size + self.num_tail_tokens

    @property
    def is_away(self) -> bool:
        """Whether a part of it is only on the host."""
        tail_is_away = self.tail is not None and not self.tail.page
        return tail_is_away or any(not node.page for node in self.nodes)


NO_MATCH = Match([])


@dataclass(slots=True)
class PrefixIndex:
    """The pages with known content. A node exists as long as its content is on the device or on the host.

    Invariant: if a page is on the device, so is its parent.
    """

    page_size: int
    _roots: dict[bytes, PageNode] = field(default_factory=dict)  # by key
    _by_page: dict[int, PageNode] = field(default_factory=dict)

    def match(self, tokens: Int32, salt: str) -> Match:
        """The longest prefix of ``tokens``. The last node may match in part: half a page, or all that is left."""
        parent = self._roots.get(root_key(salt))
        if parent is None:
            return NO_MATCH
        nodes: list[PageNode] = []
        size = self.page_size
        # At once: a slice of an array takes several times as long as one of bytes, and long prompts have thousands.
        content, step = tokens.tobytes(), size * tokens.itemsize
        for start in range(0, len(content) - step + 1, step):
            node = parent.children.get(content[start : start + step])
            if node is None:
                break
            nodes.append(node)
            parent = node
        rest = tokens[size * len(nodes) :][:size]
        tail, num_tail_tokens = _closest(parent, rest)
        if num_tail_tokens < min(len(rest), max(1, size // 2)):
            return Match(nodes)
        return Match(nodes, tail, num_tail_tokens)

    def root(self, key: bytes) -> PageNode:
        """The root with this key: an existing or a new one, under which a page must be added."""
        return self._roots.setdefault(key, PageNode(None, key, 0))

    def add(self, parent: PageNode, tokens: bytes) -> PageNode:
        """The node of this page under ``parent``: an existing or a new one."""
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = PageNode(parent, tokens, parent.depth + 1)
        return node

    def put(self, node: PageNode, page: int) -> None:
        """The content of ``node`` is now in ``page``."""
        node.page = page
        self._by_page[page] = node

    def take(self, page: int) -> PageNode | None:
        """The node whose content was in ``page``, and is there no longer."""
        node = self._by_page.pop(page, None)
        if node is not None:
            node.page = TRASH_PAGE
        return node

    def node_of(self, page: int) -> PageNode | None:
        return self._by_page.get(page)

    def remove(self, node: PageNode) -> list[PageNode]:
        """Remove ``node`` and its descendants; returns them, possibly still with their pages."""
        parent = node.parent
        assert parent is not None, "a root cannot be removed"
        del parent.children[node.tokens]
        if parent.parent is None and not parent.children:
            del self._roots[parent.tokens]
        gone = list(_descend(node))
        for item in gone:
            self._by_page.pop(item.page, None)
        return gone

    def nodes(self) -> Iterator[PageNode]:
        """All nodes except the roots."""
        for root in self._roots.values():
            for child in root.children.values():
                yield from _descend(child)

    def check(self, idle_pages: list[int]) -> None:
        """Check the invariant, and that idle pages are evicted from the ends of their chains.

        Raises:
            PageLedgerError: names the first page that violates this.
        """
        order = {page: index for index, page in enumerate(idle_pages)}
        never = len(order)
        on_device = {node.page: node for node in self.nodes() if node.page}
        if on_device != self._by_page:
            raise PageLedgerError(f"pages {on_device.keys() ^ self._by_page.keys()} disagree with the index")
        for page, node in on_device.items():
            parent = node.parent
            if parent is None or parent.parent is None:
                continue
            if not parent.page:
                raise PageLedgerError(f"page {page} is on the device, but its parent is not")
            if order.get(parent.page, never) < order.get(page, never):
                raise PageLedgerError(f"page {parent.page} would be evicted before page {page}, its child")


def _descend(node: PageNode) -> Iterator[PageNode]:
    stack = [node]
    while stack:
        item = stack.pop()
        stack.extend(item.children.values())
        yield item


def _closest(parent: PageNode, tokens: Int32) -> tuple[PageNode | None, int]:
    """The child of ``parent`` with the longest common prefix with ``tokens``, and the length of that prefix.

    The latest pages come first: a repeated request most likely continues the latest answer.
    """
    best, most = None, 0
    if len(tokens):
        for node in islice(reversed(parent.children.values()), _MAX_TAILS):
            differs = np.frombuffer(node.tokens, np.int32)[: len(tokens)] != tokens
            num_equal = int(differs.argmax()) if differs.any() else len(tokens)
            if num_equal > most:
                best, most = node, num_equal
    return best, most
