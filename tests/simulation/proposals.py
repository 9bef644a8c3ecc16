"""Proposals of the hash model's next tokens, one in four of which is wrong."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

from tests.simulation.plan import Plan
from triptych.workers.execute.hash_lm import expected_tokens
from triptych.workers.execute.hash_model import VOCAB_SIZE
from triptych.workers.execute.scheduling.proposals import Proposer
from triptych.workers.execute.scheduling.sequence import Sequence


def allow_proposals(plan: Plan, dice: random.Random) -> None:
    scheduler = replace(plan.config.scheduler, num_speculative_tokens=dice.choice((1, 3, 8)))
    plan.config = replace(plan.config, scheduler=scheduler)


class Guesses(Proposer):
    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        prompt = tuple(sequence.tokens[: sequence.num_prompt_tokens].tolist())
        first = sequence.num_output_tokens
        outputs = _said(prompt, sequence.max_tokens, sequence.params.temperature, sequence.seed, sequence.adapter)
        return [
            token % (VOCAB_SIZE - 1) + 1 if token % 4 == 0 else token for token in outputs[first : first + max_tokens]
        ]


@lru_cache(maxsize=256)
def _said(prompt: tuple[int, ...], num_tokens: int, temperature: float, seed: int, adapter: int) -> list[int]:
    return expected_tokens(prompt, num_tokens, VOCAB_SIZE, temperature=temperature, seed=seed, adapter=adapter)
