"""Sequences with the same prompt: one computes it, and the others fork from a sibling that has it.

A fork shares full pages by reference and copies the page in which the common tokens end, so no sequence writes to a
page that another one reads.

Source: Kwon et al. 2023, section 4.4 (parallel sampling).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .ahead import LookAhead
from .cache import PageCache
from .prefix import NO_MATCH, Match, PageNode
from .sequence import Key, Sequence, SequenceState, num_common


@dataclass(slots=True)
class Group:
    """The live sequences of one request.

    Invariant: while one of them computes the prompt, the others that would compute it too are held in the queue.
    """

    members: dict[Key, Sequence] = field(default_factory=dict)
    held: dict[Key, Sequence] = field(default_factory=dict)
    computing: Key | None = None
    # The last one that ended without an error, and how many of its tokens are in its pages, which may be in limbo.
    ended: tuple[Sequence, int] | None = None
    has_begun: bool = False  # whether one of them has left the queue


class _Source(NamedTuple):
    """A sequence that others can fork from."""

    sequence: Sequence
    table: list[int]
    num_tokens: int  # the first ones, whose keys and values are in these pages


class Groups:
    """The groups that have live sequences."""

    def __init__(self, cache: PageCache, ahead: LookAhead) -> None:
        self._cache, self._ahead = cache, ahead
        self._groups: dict[Key, Group] = {}
        self.computing: dict[Key, Group] = {}  # by the sequence that computes the prompt

    def join(self, sequence: Sequence) -> None:
        if sequence.group_key is not None and not sequence.is_beam:  # a search forks its beams itself
            sequence.group = self._groups.setdefault(sequence.group_key, Group())
            sequence.group.members[sequence.key] = sequence

    def leave(self, sequence: Sequence, *, is_sound: bool) -> None:
        """``sequence`` has ended; if others may fork from its pages, these are in limbo."""
        group = sequence.group
        if group is None:
            return
        group.held.pop(sequence.key, None)
        del group.members[sequence.key]
        num_tokens = sequence.num_computed_tokens - self._ahead.num_in_flight.get(sequence.key, 0)
        if is_sound and num_tokens >= sequence.num_prompt_tokens:
            group.ended = sequence, num_tokens
        if not group.members:
            assert sequence.group_key is not None, f"{sequence.key} is in a group without a key"
            del self._groups[sequence.group_key]
        sequence.group = None

    def holds(self, sequence: Sequence) -> bool:
        """Whether ``sequence`` must wait until a sibling has computed the prompt; if so, it is recorded as held."""
        group = sequence.group
        if group is None or group.computing is None or sequence.num_computed_tokens:
            return False
        group.held[sequence.key] = sequence
        return True

    def start(self, sequence: Sequence) -> list[Sequence]:
        """``sequence`` leaves the queue; if it computes the prompt of others, returns those to hold from now on."""
        group = sequence.group
        if group is None:
            return []
        group.has_begun = True
        if sequence.num_computed_tokens >= sequence.num_prompt_tokens - 1 or not self._may_share(sequence):
            return []
        group.computing = sequence.key
        self.computing[sequence.key] = group
        return [s for s in group.members.values() if s.state is SequenceState.WAITING and self.holds(s)]

    def _may_share(self, sequence: Sequence) -> bool:
        """Whether others can continue from its prompt. With recurrent layers that takes a full page."""
        return self._cache.is_whole or (
            self._cache.shares_prefixes and sequence.num_prompt_tokens > self._cache.pool.page_size
        )

    def compute(self, sequence: Sequence) -> list[Sequence]:
        """A sequence of ``computing`` has computed a chunk; returns those that may fork from it now."""
        return self.stop(sequence) if sequence.num_computed_tokens >= sequence.num_prompt_tokens else []

    def stop(self, sequence: Sequence) -> list[Sequence]:
        """``sequence`` no longer computes its prompt; returns those that were held for it."""
        group = self.computing.pop(sequence.key, None)
        if group is None:
            return []
        group.computing = None
        held, group.held = list(group.held.values()), {}
        return held

    def find(self, sequence: Sequence) -> Match:
        """The longest prefix of a waiting sequence already in pages: cached, or computed by a sibling."""
        best = self._cache.find(sequence)
        if sequence.group is None or not self._cache.is_whole:
            return best
        size = self._cache.pool.page_size
        for source in self._sources(sequence, sequence.group):
            fork = self._fork(sequence, source, more_than=best.num_tokens(size))
            best = max((best, fork), key=lambda match: match.num_tokens(size))
        return best

    def _sources(self, sequence: Sequence, group: Group) -> Iterator[_Source]:
        """The siblings of ``sequence`` that have pages.

        What a step in flight computes is not in them yet: if that step fails, it is run again, but only for sequences
        that have not ended, and the copies that were made of its pages meanwhile are not made again.
        """
        in_flight = self._ahead.num_in_flight
        for sibling in group.members.values():
            if sibling is not sequence and sibling.block_table:
                num_tokens = sibling.num_computed_tokens - in_flight.get(sibling.key, 0)
                yield _Source(sibling, sibling.block_table, num_tokens)
        if group.ended is not None:
            ended, num_tokens = group.ended
            if table := self._cache.limbo.table(ended.key):
                yield _Source(ended, table, num_tokens)

    def _fork(self, sequence: Sequence, source: _Source, *, more_than: int) -> Match:
        """What ``sequence`` can share or copy from the pages of a sibling. At least one token is left to compute.

        Nothing, unless these are more than ``more_than`` tokens: only then are pages looked up. All siblings share the
        prompt, and otherwise each of many would look up all pages of every other one.
        """
        size, table = self._cache.pool.page_size, source.table
        if sequence.host_table:  # has its own computed tokens on the host, and can share full pages only
            limit = min(sequence.num_computed_tokens, source.num_tokens) // size * size
        else:
            limit = min(sequence.num_reusable_tokens, source.num_tokens)
        limit = min(limit, len(table) * size)
        num_tokens = num_common(sequence, source.sequence, limit) if limit > more_than else 0
        if num_tokens <= more_than:
            return NO_MATCH
        nodes = self._nodes(table[: num_tokens // size])
        num_tail_tokens = num_tokens - len(nodes) * size
        if not 0 < num_tail_tokens < size or sequence.host_table:
            return Match(nodes)
        return Match(nodes, PageNode(None, b"", len(nodes) + 1, table[len(nodes)]), num_tail_tokens)

    def _nodes(self, pages: list[int]) -> list[PageNode]:
        """The index nodes of these pages, as far as known; without prefix sharing, nodes outside the index."""
        if not self._cache.shares_prefixes:
            return [PageNode(None, b"", depth, page) for depth, page in enumerate(pages, 1)]
        nodes: list[PageNode] = []
        for page in pages:
            node = self._cache.index.node_of(page)
            if node is None:
                break
            nodes.append(node)
        return nodes
