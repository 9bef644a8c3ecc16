"""Some plain requests ask for an adapter, under which the hash model says something else."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.plan import Plan
from tests.simulation.requests import Request, make_request
from triptych.protocol.config import ModelConfig
from triptych.workers.execute.hash_lm import expected_tokens
from triptych.workers.execute.hash_model import VOCAB_SIZE

NAMES = ("a", "b")
CHANCE = 0.6  # of a request to have one, in a run with adapters


def give_adapters(plan: Plan, dice: random.Random) -> None:
    plan.config = replace(
        plan.config, model=ModelConfig(model="hash-lm", lora_modules=tuple(f"{name}=nowhere" for name in NAMES))
    )
    plan.card = replace(plan.card, adapters={name: f"digest of {name}" for name in NAMES})
    for request in plan.requests:
        is_plain = request.is_valid and not (request.is_poison or request.is_killer or request.sequences)
        if dice.random() < CHANCE and is_plain:
            _give(request, dice.randrange(len(NAMES)), plan.card.max_model_len)


def _give(request: Request, index: int, max_model_len: int) -> None:
    request.wire["lora"] = NAMES[index]
    said = expected_tokens(
        request.prompt,
        min(request.wire["max_tokens"], max_model_len - len(request.prompt)),
        VOCAB_SIZE,
        temperature=request.wire.get("temperature", 0.0),
        seed=request.wire.get("seed", 0),
        adapter=index + 1,
    )
    other = make_request(request.request_id, request.wire, said)
    request.journaled, request.token_ids = other.journaled, other.token_ids
    request.text, request.reason = other.text, other.reason
