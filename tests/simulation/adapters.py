"""Some plain requests select an adapter, with which the hash model gives another answer.

In some runs an operator loads and unloads adapters all the time (``drivers.py``); then the expected answer of a request
is known once it is accepted.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulation.drivers import FOLDERS, digest_of, module
from tests.simulation.plan import MS, Plan, submitting
from tests.simulation.requests import Request, make_request, random_request
from triptych.protocol.config import ModelConfig
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import expected_tokens

if TYPE_CHECKING:
    from tests.simulation.world import World

NAMES = ("a", "b")
CHANCE = 0.6  # probability that a request selects one, in a run with adapters
UNTIL_NS = 500 * MS  # an operator loads and unloads it, and requests select it


def give_adapters(plan: Plan, dice: random.Random) -> None:
    _name_adapters(plan, *(f"{name}=nowhere" for name in NAMES))
    plan.card = replace(plan.card, adapters={name: f"digest of {name}" for name in NAMES})
    for request in plan.requests:
        if dice.random() < CHANCE and _is_plain(request):
            index = dice.randrange(len(NAMES))
            request.wire["lora"] = NAMES[index]
            request.take_answer(_under(request, index + 1, plan.card.max_model_len))


def let_adapters_change(plan: Plan, dice: random.Random) -> None:
    if dice.random() < 0.5:
        _name_adapters(plan, module("a", FOLDERS["a"][0]))
    for number in range(dice.randrange(3, 9)):
        request = random_request(dice, f"l{number}", plan.card, common=[])
        if _is_plain(request):
            plan.requests.append(request)
            plan.actions.append((dice.randrange(UNTIL_NS), submitting(dice.randrange(plan.num_clients), request)))
    for request in plan.requests:
        if dice.random() < CHANCE and _is_plain(request):
            name = request.wire["lora"] = dice.choice(tuple(FOLDERS))
            max_model_len = plan.card.max_model_len
            request.by_adapter = {digest_of(each): _under(request, int(each), max_model_len) for each in FOLDERS[name]}
    for _ in range(dice.randrange(2, 7)):
        plan.actions.append((dice.randrange(UNTIL_NS), _operate))


def _operate(world: World) -> None:
    assert world.drivers is not None, "the run has changing adapters"
    world.drivers.operate()


def _name_adapters(plan: Plan, *modules: str) -> None:
    plan.config = replace(plan.config, model=ModelConfig(model="hash-lm", lora_modules=modules))


def _is_plain(request: Request) -> bool:
    return request.is_valid and not (request.is_poison or request.is_killer or request.sequences)


def _under(request: Request, adapter: int, max_model_len: int) -> Request:
    output = expected_tokens(
        request.prompt,
        min(request.wire["max_tokens"], max_model_len - len(request.prompt)),
        VOCAB_SIZE,
        temperature=request.wire.get("temperature", 0.0),
        seed=request.wire.get("seed", 0),
        adapter=adapter,
    )
    return make_request(request.request_id, request.wire, output)
