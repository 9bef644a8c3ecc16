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


class Heir(NamedTuple):
    """A beam of the next step, in the sequence that continues it."""

    sequence: Sequence
    parent: Sequence  # whose tokens and pages it continues; may be the same sequence
    branch: Branch


def make_search(beam: Sequence, max_tokens: int) -> Search:
    return BeamSearch(beam.params, stop_ids=beam.stop_ids, max_tokens=max_tokens)


@dataclass(slots=True)
class _Gang:
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
        self._gangs: dict[Key, _Gang] = {}

    def join(self, sequence: Sequence) -> list[Sequence]:
        """The sequences that may start now: the first beam of a search, once all of them have arrived."""
        if not sequence.params.is_beam_search:
            return []
        key = self._key(sequence)
        gang = self._gangs.setdefault(key, _Gang(self._search_of(sequence)))
        gang.members.append(sequence)
        if len(gang.members) < sequence.params.num_beams:
            return []
        gang.members.sort(key=lambda s: s.arrival)
        self._begin(gang)
        return [gang.members[0]]

    def holds(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence is a beam that does not start by itself."""
        if not sequence.params.is_beam_search:
            return False
        gang = self._gangs[self._key(sequence)]
        return not gang.beams or gang.beams[0] is not sequence

    def start(self, sequence: Sequence, step: int) -> None:
        """The first beam leaves the queue: the search has begun for all of its beams."""
        if sequence.params.is_beam_search:
            for member in self._gangs[self._key(sequence)].members:
                member.last_step = max(member.last_step, step)

    def family(self, sequence: Sequence) -> list[Sequence]:
        """The sequences to preempt and resume together: ``sequence``, and for a beam all others that have pages."""
        if not sequence.params.is_beam_search:
            return [sequence]
        members = self._gangs[self._key(sequence)].members
        return [sequence, *(s for s in members if s is not sequence and s.state in _HAVE_PAGES)]

    def state_at_start(self, sequence: Sequence) -> SequenceState:
        """The state of a beam that leaves the queue: paused if it had taken its step before it was swapped out."""
        gang = self._gangs[self._key(sequence)]
        has_step = sequence in gang.beams and sequence.key not in gang.found
        return SequenceState.PREFILLING if has_step else SequenceState.PAUSED

    def take(self, sequence: Sequence, found: Candidates) -> list[Heir] | None:
        """Record a beam's step. Once all have taken it: the beams of the next step, none if the search is over."""
        gang = self._gangs[self._key(sequence)]
        gang.found[sequence.key] = found
        sequence.state = SequenceState.PAUSED
        if len(gang.found) < len(gang.beams):
            return None
        outputs = [beam.output_tokens.tolist() for beam in gang.beams]
        branches = gang.search.advance(outputs, [gang.found[beam.key] for beam in gang.beams])
        gang.found.clear()
        heirs = self._branch(gang, branches)
        gang.beams = [heir.sequence for heir in heirs]
        gang.is_over = not branches
        return heirs

    def conclude(self, sequence: Sequence) -> list[tuple[Sequence, Hypothesis]]:
        """If its search is over: the answers of its sequences, the best to the earliest arrival; otherwise nothing."""
        gang = self._gangs[self._key(sequence)]
        if not gang.is_over:
            return []
        del self._gangs[self._key(sequence)]
        found = [*gang.search.hypotheses, *[_NOTHING] * len(gang.members)]
        return list(zip(gang.members, found, strict=False))

    def num_pages(self, sequence: Sequence) -> int:
        """The most pages that a sequence, or all beams of its search together, may hold at once."""
        if not sequence.params.is_beam_search:
            return self._cache.pages_for(sequence.num_tokens)
        num_tokens = sequence.num_prompt_tokens
        # The last token of a hypothesis is never computed.
        longest = num_tokens + self._max_output(sequence) - 1
        num_shared = num_tokens // self._cache.pool.page_size
        return num_shared + sequence.params.num_beams * (self._cache.pages_for(longest) - num_shared)

    def restart(self, sequence: Sequence) -> None:
        """If ``sequence`` is a beam: discard the output of its whole search, and start over with the first beam."""
        if sequence.params.is_beam_search:
            gang = self._gangs[self._key(sequence)]
            for member in gang.members:
                member.num_tokens = member.num_prompt_tokens
            self._begin(gang)

    def disband(self, sequence: Sequence) -> list[Sequence]:
        """``sequence`` has ended, and its search with it; returns the others, which end too."""
        if not sequence.params.is_beam_search:
            return []
        gang = self._gangs.pop(self._key(sequence), None)
        return [member for member in gang.members if member is not sequence] if gang else []

    def _begin(self, gang: _Gang) -> None:
        gang.search = self._search_of(gang.members[0])
        gang.beams = gang.members[:1]
        gang.found.clear()

    def _branch(self, gang: _Gang, branches: list[Branch]) -> list[Heir]:
        """The heirs of these branches. The first branch of a beam stays in its sequence and keeps its pages."""
        parents = gang.beams
        stays = {branch.parent: index for index, branch in reversed(list(enumerate(branches)))}
        left = iter([s for s in gang.members if s not in [parents[parent] for parent in stays]])
        heirs = []
        for index, branch in enumerate(branches):
            parent = parents[branch.parent]
            heirs.append(Heir(parent if stays[branch.parent] == index else next(left), parent, branch))
        for heir, parent, _ in heirs:
            if heir is not parent:
                heir.tokens[: parent.num_tokens] = parent.tokens[: parent.num_tokens]
                heir.num_tokens = parent.num_tokens
                self._cache.fork(heir, parent)
                self._cache.states.fork(heir, parent)
        for heir, _, branch in heirs:
            heir.append(branch.token_id)
        return heirs

    def _key(self, sequence: Sequence) -> Key:
        return sequence.key if sequence.group_key is None else sequence.group_key

    def _search_of(self, sequence: Sequence) -> Search:
        return self._make_search(sequence, self._max_output(sequence))

    def _max_output(self, sequence: Sequence) -> int:
        return min(sequence.max_tokens, self._max_model_len - sequence.num_prompt_tokens)
