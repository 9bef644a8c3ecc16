"""Some plain requests ask for the embedding of their prompt in place of an answer."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from tests.simulation.plan import Plan
from tests.simulation.requests import PREPARE_KILLER, Request
from triptych.driver.stream import Completion
from triptych.protocol.arrays import Float32
from triptych.workers.execute.hash_lm import EMBEDDING_SIZE, hidden_of, state_of
from triptych.workers.execute.scheduling.pooling import LAST_TOKEN, MEAN

if TYPE_CHECKING:
    from tests.simulation.users import Reader

CHANCE = 0.5  # probability that a request asks for one, in a run with embeddings
KEPT = ("prompt_token_ids", "priority", "cache_salt", "deadline_ms", "max_queue_ms")


def ask_for_embeddings(plan: Plan, dice: random.Random) -> None:
    plan.card = replace(plan.card, embedding_size=EMBEDDING_SIZE, pooling=dice.choice((LAST_TOKEN, MEAN)))
    for request in plan.requests:
        size = dice.choice((None, 1, EMBEDDING_SIZE // 2))
        if dice.random() < CHANCE and request.is_valid and not request.sequences and "lora" not in request.wire:
            _embed(request, size)


def _embed(request: Request, size: int | None) -> None:
    """A prompt that is fatal to execute is so when it is computed, as that is all that is."""
    request.wire = {name: request.wire[name] for name in KEPT if name in request.wire}
    request.wire |= {"embedding": True, **({} if size is None else {"dimensions": size})}
    is_fatal = request.prompt[0] >= PREPARE_KILLER
    request.journaled, request.token_ids, request.text = [], [], ""
    request.reason = "error" if request.is_poison else "poisoned" if is_fatal else "length"


def check_embedding(reader: Reader, completion: Completion) -> None:
    """There is one exactly if it was asked for, and it is that of the prompt."""
    request, found = reader.request, completion.embedding
    require, name = reader.client.world.require, request.request_id
    if "embedding" not in request.wire:
        require(found is None, f"{name} did not ask for its embedding")
    elif found is not None or completion.finish_reason != "abort":
        pooling = reader.client.world.card.pooling
        expected = _embedding(tuple(request.prompt), request.wire.get("dimensions", EMBEDDING_SIZE), pooling)
        is_right = found is not None and np.array_equal(found, expected)
        require(is_right, f"{name}: its embedding is {found}, expected {expected}")


@cache
def _embedding(prompt: tuple[int, ...], size: int, pooling: str) -> Float32:
    """Exact before the last two lines, as hidden states are integers here."""
    first = 1 if pooling == MEAN else len(prompt)
    states = [hidden_of(state_of(prompt[:end]))[:size] for end in range(first, len(prompt) + 1)]
    values = np.sum(states, 0, dtype=np.float64) / len(states)
    embedding: Float32 = (values / np.sqrt(np.square(values).sum())).astype(np.float32)
    return embedding
