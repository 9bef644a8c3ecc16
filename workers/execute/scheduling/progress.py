"""The outcome of a step, in columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .beam_search import Hypothesis
from .beams import NextBeam
from .sequence import Key


class Grown(NamedTuple):
    """A beam that continues."""

    key: Key
    parent: Key  # whose tokens it continues with one more
    token_index: int
    token_id: int


class Choice(NamedTuple):
    """The decision of a search after a step that all of its beams had taken."""

    beams: list[Grown]  # of the next step, best first; empty if the search is over
    ends: list[str]  # if it is over: why the hypothesis of each of its sequences ended, in order of arrival


@dataclass(slots=True)
class Progress:
    """Tokens of one step, as columns with one row per token, and the sequences that ended in it."""

    keys: list[Key] = field(default_factory=list)
    token_indices: list[int] = field(default_factory=list)  # 0 for a sequence's first output token
    token_ids: list[int] = field(default_factory=list)
    choices: dict[Key, Choice] = field(default_factory=dict)  # of searches, by ``group_key``
    hypotheses: dict[Key, Hypothesis] = field(default_factory=dict)  # whole answers; also in ``finished``
    finished: dict[Key, str] = field(default_factory=dict)  # "stop" | "length"; not all got a token in this step
    expired: dict[Key, str] = field(default_factory=dict)  # which deadline passed, in words
    failed: dict[Key, str] = field(default_factory=dict)  # why, in words; none of them got a token in this step

    def emit(self, key: Key, token_index: int, token_id: int) -> None:
        self.keys.append(key)
        self.token_indices.append(token_index)
        self.token_ids.append(token_id)

    def choose(self, search: Key, successors: list[NextBeam], ends: list[str]) -> None:
        beams = [Grown(s.key, parent.key, s.num_output_tokens - 1, branch.token_id) for s, parent, branch in successors]
        self.choices[search] = Choice(beams, ends)

    def conclude(self, key: Key, hypothesis: Hypothesis) -> None:
        self.hypotheses[key] = hypothesis
        self.finished[key] = hypothesis.reason

    def by_key(self) -> dict[Key, int]:
        return dict(zip(self.keys, self.token_ids, strict=True))
