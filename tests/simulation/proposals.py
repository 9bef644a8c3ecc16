"""Proposals of the hash model's next tokens, one in four of which is wrong.

In half of the runs with proposals they come from the real draft model on pages of its own. As that is the hash model
too, all it says must be right: a page that does not hold what it should would show.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tests.simulation.plan import Plan
from triptych.protocol.model_card import ModelCard
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import HashRunner, expected_tokens
from triptych.workers.execute.model.draft.model import ON_CPU, DraftModel
from triptych.workers.execute.scheduling.proposals import Proposer
from triptych.workers.execute.scheduling.sequence import Sequence


def allow_proposals(plan: Plan, dice: random.Random) -> None:
    scheduler = replace(plan.config.scheduler, num_speculative_tokens=dice.choice((1, 3, 8)))
    plan.config = replace(plan.config, scheduler=scheduler)
    plan.has_draft_model = dice.random() < 0.5


class Guesses(Proposer):
    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        return _with_mistakes(_next_tokens(sequence, max_tokens))


class Drafts(Proposer):
    """The draft model does not know adapters."""

    def __init__(self, card: ModelCard, require: Callable[[bool, str], None]) -> None:
        num_pages = card.num_pages + ON_CPU.scratch_pages(card.page_size)
        runner: Any = HashRunner(VOCAB_SIZE, num_pages=num_pages, page_size=card.page_size)
        sizes: Any = {"num_pages": card.num_pages, "page_size": card.page_size}
        self._model = DraftModel(runner, **sizes, vocab_size=VOCAB_SIZE, known_ids=VOCAB_SIZE)
        self._require = require

    def begin(self, wanted: list[tuple[Sequence, int]]) -> None:
        self._model.begin(wanted)
        self._require(self._model._is_sound, "the draft model failed")

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int] | None:
        if (proposed := self._model.propose(sequence, max_tokens)) is None:
            return None
        right = _next_tokens(sequence, len(proposed))
        self._require(proposed == right or sequence.adapter > 0, f"the draft model says {proposed} in place of {right}")
        return _with_mistakes(proposed)


def _with_mistakes(tokens: list[int]) -> list[int]:
    return [token % (VOCAB_SIZE - 1) + 1 if token % 4 == 0 else token for token in tokens]


def _next_tokens(sequence: Sequence, max_tokens: int) -> list[int]:
    prompt = tuple(sequence.tokens[: sequence.num_prompt_tokens].tolist())
    first = sequence.num_output_tokens
    outputs = _said(prompt, sequence.max_tokens, sequence.params.temperature, sequence.seed, sequence.adapter)
    return outputs[first : first + max_tokens]


@lru_cache(maxsize=256)
def _said(prompt: tuple[int, ...], num_tokens: int, temperature: float, seed: int, adapter: int) -> list[int]:
    return expected_tokens(prompt, num_tokens, VOCAB_SIZE, temperature=temperature, seed=seed, adapter=adapter)
