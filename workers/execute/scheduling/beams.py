"""Beam searches as sequences: each beam is a sequence, and beams that continue from the same beam share its pages.

All beams of a search take a step before any takes the next; a beam whose step has been computed is paused until then. A
search is preempted and resumed as a whole, as a single beam could not continue. If its pages cannot be swapped out it
restarts from the prompt, which yields the same hypotheses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .beam_search import BeamSearch, Branch, Candidates, Hypothesis, Search
from .cache import PageCache
from .sequence import Key, Sequence, SequenceState

_NOTHING = Hypothesis([], float("-inf"), "length")  # where a tiny vocabulary yields fewer hypotheses than beams
_HAVE_PAGES = (SequenceState.PREFILLING, SequenceState.PAUSED, SequenceState.SWAPPED)  # on the device, or on the host

MakeSearch = Callable[[Sequence, int], Search]  # a beam, and its maximum number of output tokens


class NextBeam(NamedTuple):
    """A beam of the next step, in the sequence that continues it."""

    sequence: Sequence
    parent: Sequence  # whose tokens and pages it continues; may be the same sequence
    branch: Branch


def make_search(beam: Sequence, max_tokens: int) -> Search:
    return BeamSearch(beam.params, stop_ids=beam.stop_ids, max_tokens=max_tokens)


@dataclass(slots=True)
class _LiveSearch:
    """The sequences of one search, in order of arrival. The first one computes the prompt."""

    search: Search
    members: list[Sequence] = field(default_factory=list)
    beams: list[Sequence] = field(default_factory=list)  # the continuing ones, in the order of the search
    found: dict[Key, Candidates] = field(default_factory=dict)  # of the beams that have taken this step
    is_over: bool = False


class Beams:
    """The searches that are live."""

    def __init__(self, cache: PageCache, max_model_len: int, make_search: MakeSearch = make_search) -> None:
        self._cache = cache
        self._make_search = make_search
        self._max_model_len = max_model_len
        self._live: dict[Key, _LiveSearch] = {}

    def join(self, sequence: Sequence) -> list[Sequence]:
        """The sequences that may start now: the first beam of a search, once all of them have arrived."""
        if not sequence.is_beam:
            return []
        key = self._key(sequence)
        live = self._live.setdefault(key, _LiveSearch(self._search_of(sequence)))
        live.members.append(sequence)
        if len(live.members) < sequence.params.num_beams:
            return []
        live.members.sort(key=lambda s: s.arrival)
        self._begin(live)
        return [live.members[0]]

    def holds(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence is a beam that does not start by itself."""
        if not sequence.is_beam:
            return False
        live = self._live[self._key(sequence)]
        return not live.beams or live.beams[0] is not sequence

    def start(self, sequence: Sequence, step: int) -> None:
        """The first beam leaves the queue: the search has begun for all of its beams."""
        if sequence.is_beam:
            for member in self._live[self._key(sequence)].members:
                member.last_step = step

    def family(self, sequence: Sequence) -> list[Sequence]:
        """The sequences to preempt and resume together: ``sequence``, and for a beam all others that have pages."""
        if not sequence.is_beam:
            return [sequence]
        members = self._live[self._key(sequence)].members
        return [sequence, *(s for s in members if s is not sequence and s.state in _HAVE_PAGES)]

    def state_at_start(self, sequence: Sequence) -> SequenceState:
        """The state of a beam that leaves the queue: paused if it had taken its step before it was swapped out."""
        live = self._live[self._key(sequence)]
        has_step = sequence in live.beams and sequence.key not in live.found
        return SequenceState.PREFILLING if has_step else SequenceState.PAUSED

    def take(self, sequence: Sequence, found: Candidates) -> list[NextBeam] | None:
        """Record a beam's step. Once all have taken it: the beams of the next step, none if the search is over."""
        live = self._live[self._key(sequence)]
        live.found[sequence.key] = found
        sequence.state = SequenceState.PAUSED
        if len(live.found) < len(live.beams):
            return None
        outputs = [beam.output_tokens.tolist() for beam in live.beams]
        branches = live.search.advance(outputs, [live.found[beam.key] for beam in live.beams])
        live.found.clear()
        successors = self._branch(live, branches)
        live.beams = [successor.sequence for successor in successors]
        live.is_over = not branches
        return successors

    def conclude(self, sequence: Sequence) -> list[tuple[Sequence, Hypothesis]]:
        """If its search is over: the answers of its sequences, the best to the earliest arrival; otherwise nothing."""
        live = self._live[self._key(sequence)]
        if not live.is_over:
            return []
        del self._live[self._key(sequence)]
        found = [*live.search.hypotheses, *[_NOTHING] * len(live.members)]
        return list(zip(live.members, found, strict=False))

    def num_pages(self, sequence: Sequence) -> int:
        """The most pages that a sequence, or all beams of its search together, may hold at once."""
        if not sequence.is_beam:
            return self._cache.pages_for(sequence.num_tokens)
        num_tokens = sequence.num_prompt_tokens
        # The last token of a hypothesis is never computed.
        longest = num_tokens + self._max_output(sequence) - 1
        num_shared = num_tokens // self._cache.pool.page_size
        return num_shared + sequence.params.num_beams * (self._cache.pages_for(longest) - num_shared)

    def restart(self, sequence: Sequence) -> None:
        """If ``sequence`` is a beam: discard the output of its whole search, and start over with the first beam."""
        if sequence.is_beam:
            live = self._live[self._key(sequence)]
            for member in live.members:
                member.num_tokens = member.num_prompt_tokens
            self._begin(live)

    def disband(self, sequence: Sequence) -> list[Sequence]:
        """``sequence`` has ended, and its search with it; returns the others, which end too."""
        if not sequence.is_beam:
            return []
        live = self._live.pop(self._key(sequence), None)
        return [member for member in live.members if member is not sequence] if live else []

    def _begin(self, live: _LiveSearch) -> None:
        live.search = self._search_of(live.members[0])
        live.beams = live.members[:1]
        live.found.clear()

    def _branch(self, live: _LiveSearch, branches: list[Branch]) -> list[NextBeam]:
        """The successors of these branches. The first branch of a beam stays in its sequence and keeps its pages."""
        parents = live.beams
        stays = {branch.parent: index for index, branch in reversed(list(enumerate(branches)))}
        left = iter([s for s in live.members if s not in [parents[parent] for parent in stays]])
        successors = []
        for index, branch in enumerate(branches):
            parent = parents[branch.parent]
            successors.append(NextBeam(parent if stays[branch.parent] == index else next(left), parent, branch))
        for successor, parent, _ in successors:
            if successor is not parent:
                successor.tokens[: parent.num_tokens] = parent.tokens[: parent.num_tokens]
                successor.num_tokens = parent.num_tokens
                self._cache.fork(successor, parent)
                self._cache.states.fork(successor, parent)
        for successor, _, branch in successors:
            successor.append(branch.token_id)
        return successors

    def _key(self, sequence: Sequence) -> Key:
        return sequence.key if sequence.group_key is None else sequence.group_key

    def _search_of(self, sequence: Sequence) -> Search:
        return self._make_search(sequence, self._max_output(sequence))

    def _max_output(self, sequence: Sequence) -> int:
        return min(sequence.max_tokens, self._max_model_len - sequence.num_prompt_tokens)
