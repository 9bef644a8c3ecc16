"""What a step brought, in columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .beam_search import Branch, Hypothesis
from .beams import Heir
from .sequence import Key


class Grown(NamedTuple):
    """How a beam of the next step came about."""

    key: Key
    parent: Key
    branch: Branch


@dataclass(slots=True)
class Progress:
    """Tokens of one step, row i of each column belonging together, and the sequences that ended in it."""

    keys: list[Key] = field(default_factory=list)
    token_indices: list[int] = field(default_factory=list)  # 0 for a sequence's first output token
    token_ids: list[int] = field(default_factory=list)
    branches: dict[Key, list[Grown]] = field(default_factory=dict)  # of each search that chose; none: it is over
    hypotheses: dict[Key, Hypothesis] = field(default_factory=dict)  # whole answers; these have finished, too
    finished: dict[Key, str] = field(default_factory=dict)  # why: "stop" | "length"; not all got a token in this step
    expired: dict[Key, str] = field(default_factory=dict)  # why, in words: which deadline passed
    failed: dict[Key, str] = field(default_factory=dict)  # why, in words; none of them got a token in this step

    def emit(self, key: Key, token_index: int, token_id: int) -> None:
        self.keys.append(key)
        self.token_indices.append(token_index)
        self.token_ids.append(token_id)

    def branch(self, search: Key, heirs: list[Heir]) -> None:
        self.branches[search] = [Grown(heir.sequence.key, heir.parent.key, heir.branch) for heir in heirs]

    def conclude(self, key: Key, hypothesis: Hypothesis) -> None:
        self.hypotheses[key] = hypothesis
        self.finished[key] = hypothesis.reason

    def by_key(self) -> dict[Key, int]:
        return dict(zip(self.keys, self.token_ids, strict=True))
