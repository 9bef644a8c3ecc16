"""Some requests ask for logprobs, of their prompt or of their answer, which the hash model defines for each context."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulation.plan import Plan
from triptych.driver.stream import Completion
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import logprob_of, state_of

if TYPE_CHECKING:
    from tests.simulation.users import Reader

PROMPT_CHANCE, ANSWER_CHANCE = 0.5, 0.4  # probability that a request asks for them, in a run with logprobs
MOST = 3  # alternatives


def ask_for_logprobs(plan: Plan, dice: random.Random) -> None:
    for request in plan.requests:
        chances = {"prompt_logprobs": PROMPT_CHANCE, "logprobs": ANSWER_CHANCE}
        asked = {name: dice.randrange(MOST) for name, chance in chances.items() if dice.random() < chance}
        if request.is_valid and not request.is_beam_search and "lora" not in request.wire:
            for each in (request, *request.sequences):
                each.wire |= asked


def check_logprobs(reader: Reader, completion: Completion) -> None:
    """What was asked for has arrived, and is what the model says about each context."""
    wire, prompt, tokens = reader.request.wire, reader.request.prompt, reader.token_ids
    if reader.choices or reader.request.is_beam_search or "lora" in wire:
        return
    require, name = reader.client.world.require, reader.request.request_id
    if (count := wire.get("logprobs")) is not None and completion.token_ids:
        found = completion.logprobs or []
        first = len(tokens) - len(found)  # after a resumption, of what followed
        expected = [_row([*prompt, *tokens[:i]], tokens[i], count) for i in range(first, len(tokens))]
        require(bool(found) and found == expected, f"{name}: logprobs {found}, expected {expected}")
    if (count := wire.get("prompt_logprobs")) is not None and completion.index == 0:
        scores = [score for score in completion.prompt_logprobs or [] if score is not None]  # the first token has none
        known = [[score.logprob, [list(each) for each in score.alternatives]] for score in scores]
        expected = [_row(prompt[:i], prompt[i], count) for i in range(1, len(prompt))]
        is_early = completion.finish_reason == "abort" and not known
        require(known == expected or is_early, f"{name}: logprobs of the prompt {known}, expected {expected}")


def _row(context: Sequence[int], token_id: int, count: int) -> list[Any]:
    state = state_of(context)
    ids = [(state + rank) % (VOCAB_SIZE - 1) + 1 for rank in range(count)]
    return [_logprob(state, token_id), [[each, _logprob(state, each)] for each in ids]]


def _logprob(state: int, token_id: int) -> float:
    return float(np.float32(logprob_of(state, token_id, VOCAB_SIZE)))
