"""The decisions of beam searches as plain values, and searches that repeat them.

A scheduler only needs to know which beams continue from which, and why hypotheses ended; the scores behind these
decisions are not needed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .beam_search import Branch, Candidates, Hypothesis, Search
from .progress import Choice
from .sequence import Key, Sequence

NO_CANDIDATES = Candidates(np.zeros(0, np.int32), np.zeros(0, np.float32))  # of a beam whose search is recorded


def describe_choice(choice: Choice, tokens: list[int]) -> dict[str, Any]:
    """``tokens`` are those the beams continue with, or substitutes. Beams are identified by their slot."""
    if not choice.beams:
        return {"ends": choice.ends}
    return {"beams": [[b.key[0], b.parent[0], token] for b, token in zip(choice.beams, tokens, strict=True)]}


class RecordedChoices:
    """The decisions of the step being replayed, by the slot of their search."""

    def __init__(self) -> None:
        self._choices: dict[int, Mapping[str, Any]] = {}

    def note(self, wire: Mapping[str, Any]) -> None:
        """Set them from ``choices`` in the line of a step."""
        self._choices = {int(slot): choice for slot, choice in wire.items()}

    def take(self, search: Key) -> Mapping[str, Any]:
        """
        Raises:
            ValueError: there is none.
        """
        if search[0] not in self._choices:
            raise ValueError(f"the trace has no choice for the beam search in slot {search[0]}")
        return self._choices.pop(search[0])

    def make_search(self, beam: Sequence, max_tokens: int) -> Search:
        return _RecordedSearch(self, beam.group_key or beam.key)


class _RecordedSearch:
    def __init__(self, choices: RecordedChoices, key: Key) -> None:
        self._choices = choices
        self._key = key
        self._slots: list[int] = []  # of the continuing beams
        self.hypotheses: list[Hypothesis] = []

    def advance(self, outputs: list[list[int]], candidates: list[Candidates]) -> list[Branch]:
        choice = self._choices.take(self._key)
        self.hypotheses = [Hypothesis([], 0.0, reason) for reason in choice.get("ends", ())]
        beams = choice.get("beams", ())
        # Initially there is one beam, which no earlier choice has named.
        parents = {slot: index for index, slot in enumerate(self._slots or [parent for _, parent, _ in beams[:1]])}
        self._slots = [slot for slot, _, _ in beams]
        return [Branch(parents[parent], token_id, np.float32(0)) for _, parent, token_id in beams]
