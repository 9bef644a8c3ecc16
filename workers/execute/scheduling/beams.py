"""Beam searches as sequences: each beam is one, and those that go on from the same beam share its pages.

All beams of a search take a step before any takes the next one. A beam whose step is computed is paused meanwhile. A
search that must give its pages back starts again from the prompt, which brings the same hypotheses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .beam_search import BeamSearch, Branch, Candidates, Hypothesis
from .cache import PageCache
from .sequence import Key, Sequence, SequenceState

_NOTHING = Hypothesis([], float("-inf"), "length")  # where a tiny vocabulary has fewer than beams


@dataclass(slots=True)
class _Gang:
    """The sequences of one search, in the order of their arrival. The first one computes the prompt."""

    search: BeamSearch
    members: list[Sequence] = field(default_factory=list)
    beams: list[Sequence] = field(default_factory=list)  # those that go on, in the order of the search
    found: dict[Key, Candidates] = field(default_factory=dict)  # by those that have taken this step
    is_over: bool = False


class Beams:
    """The searches that are live."""

    def __init__(self, cache: PageCache, max_model_len: int) -> None:
        self._cache = cache
        self._max_model_len = max_model_len
        self._gangs: dict[Key, _Gang] = {}

    def join(self, sequence: Sequence) -> list[Sequence]:
        """Who may start now: the first beam of a search, once all of them are here."""
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
        """The first beam leaves the queue: the search has begun, for all of them."""
        if sequence.params.is_beam_search:
            for member in self._gangs[self._key(sequence)].members:
                member.last_step = max(member.last_step, step)

    def take(self, sequence: Sequence, found: Candidates) -> list[Sequence]:
        """A beam has taken its step; the beams of the next one, once all have. None if the search is over then."""
        gang = self._gangs[self._key(sequence)]
        gang.found[sequence.key] = found
        sequence.state = SequenceState.PAUSED
        if len(gang.found) < len(gang.beams):
            return []
        outputs = [beam.output_tokens.tolist() for beam in gang.beams]
        branches = gang.search.advance(outputs, [gang.found[beam.key] for beam in gang.beams])
        gang.found.clear()
        gang.beams = self._branch(gang, branches)
        gang.is_over = not branches
        return gang.beams

    def conclude(self, sequence: Sequence) -> list[tuple[Sequence, Hypothesis]]:
        """If its search is over: what each of its sequences says, the first to arrive the best; nothing otherwise."""
        gang = self._gangs[self._key(sequence)]
        if not gang.is_over:
            return []
        del self._gangs[self._key(sequence)]
        found = [*gang.search.hypotheses, *[_NOTHING] * len(gang.members)]
        return list(zip(gang.members, found, strict=False))

    def num_pages(self, sequence: Sequence) -> int:
        """Pages that a sequence, or all beams of its search together, may come to hold at once."""
        num_tokens = sequence.num_tokens
        if not sequence.params.is_beam_search:
            return self._cache.pages_for(num_tokens)
        # The last token of a hypothesis is never computed.
        longest = num_tokens + self._max_output(sequence) - 1
        num_shared = num_tokens // self._cache.pool.page_size
        return num_shared + sequence.params.num_beams * (self._cache.pages_for(longest) - num_shared)

    def restart(self, sequence: Sequence) -> list[Sequence]:
        """All beams that run, if ``sequence`` is one: they lose what they said, and the first one starts again."""
        if not sequence.params.is_beam_search:
            return []
        gang = self._gangs[self._key(sequence)]
        running = [s for s in gang.members if s.state in (SequenceState.PREFILLING, SequenceState.PAUSED)]
        for member in running:
            member.num_tokens = member.num_prompt_tokens
        self._begin(gang)
        return running

    def disband(self, sequence: Sequence) -> list[Sequence]:
        """``sequence`` has ended, and with it its search: the others, which end too."""
        if not sequence.params.is_beam_search:
            return []
        gang = self._gangs.pop(self._key(sequence), None)
        return [member for member in gang.members if member is not sequence] if gang else []

    def _begin(self, gang: _Gang) -> None:
        gang.search = self._search_of(gang.members[0])
        gang.beams = gang.members[:1]
        gang.found.clear()

    def _branch(self, gang: _Gang, branches: list[Branch]) -> list[Sequence]:
        """The sequences of these branches. The first that goes on from a beam stays in its sequence, pages and all."""
        parents = gang.beams
        stays = {branch.parent: index for index, branch in reversed(list(enumerate(branches)))}
        left = iter([s for s in gang.members if s not in [parents[parent] for parent in stays]])
        heirs = [
            parents[branch.parent] if stays[branch.parent] == index else next(left)
            for index, branch in enumerate(branches)
        ]
        for heir, branch in zip(heirs, branches, strict=True):
            parent = parents[branch.parent]
            if heir is not parent:
                heir.tokens[: parent.num_tokens] = parent.tokens[: parent.num_tokens]
                heir.num_tokens = parent.num_tokens
                self._cache.fork(heir, parent)
        for heir, branch in zip(heirs, branches, strict=True):
            heir.append(branch.token_id)
        return heirs

    def _key(self, sequence: Sequence) -> Key:
        return sequence.key if sequence.group_key is None else sequence.group_key

    def _search_of(self, sequence: Sequence) -> BeamSearch:
        return BeamSearch(sequence.params, stop_ids=sequence.stop_ids, max_tokens=self._max_output(sequence))

    def _max_output(self, sequence: Sequence) -> int:
        return min(sequence.max_tokens, self._max_model_len - sequence.num_prompt_tokens)
