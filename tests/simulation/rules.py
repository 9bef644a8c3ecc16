"""Some requests restrict their tokens: by a form, by a penalty, or by a least number of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from tests.simulation.forms import BROKEN, END, Form, random_form, sum_of
from tests.simulation.groups import rank
from tests.simulation.plan import Plan
from tests.simulation.requests import PREPARE_KILLER, Request, make_request, vocabulary
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import expected_tokens
from triptych.workers.execute.sampling.token_counts import count_tokens
from triptych.workers.execute.scheduling.sequence import Sequence

FORM_CHANCE, PENALTY_CHANCE, LEAST_CHANCE = 0.4, 0.4, 0.4  # of a request, in a run with rules
STOP_CHANCE = 0.2  # of a stop string, and of a stop token, for such a request
BROKEN_CHANCE = 0.08  # of a form that does not compile


def set_rules(plan: Plan, dice: random.Random) -> None:
    for request in plan.requests:
        wire = _rules(dice, request)
        if wire is not None and request.wire["max_tokens"] and request.is_valid:
            _restrict(dice, request, wire, plan.card.max_model_len)


def _rules(dice: random.Random, request: Request) -> dict[str, Any] | None:
    """The fields that restrict a request; None if it stays as it is."""
    wire: dict[str, Any] = {}
    max_tokens = request.wire.get("max_tokens", 0)
    if not isinstance(max_tokens, int) or max_tokens < 1:
        return None
    if dice.random() < FORM_CHANCE:
        wire["structured"] = {"regex": BROKEN if dice.random() < BROKEN_CHANCE else str(random_form(dice, max_tokens))}
    if dice.random() < PENALTY_CHANCE:
        wire["presence_penalty"] = 1.0
    if dice.random() < LEAST_CHANCE:
        wire["min_tokens"] = dice.randrange(1, max_tokens + 1)
    is_plain = request.prompt[0] < PREPARE_KILLER and not request.is_beam_search
    return wire if is_plain and "lora" not in request.wire else None


def _restrict(dice: random.Random, request: Request, wire: dict[str, Any], max_model_len: int) -> None:
    request.wire |= wire
    if wire.get("structured") == {"regex": BROKEN}:
        for each in request.kin:
            each.is_valid = False
        return
    capacity = min(request.wire["max_tokens"], max_model_len - len(request.prompt))
    answers = request.sequences or [request]
    outputs = [_restricted(request, capacity, index) for index in range(len(answers))]
    for name in ("stop", "stop_token_ids"):
        wanted = request.wire.pop(name, None) is not None or dice.random() < STOP_CHANCE
        if wanted and len(outputs[0]) > 2:
            token_ids = outputs[0][1:3]
            text = vocabulary().tokenizer.decode(token_ids, skip_special_tokens=False)
            request.wire[name] = [text] if name == "stop" else token_ids[:1]
    for answer, output in zip(answers, outputs, strict=True):
        answer.take_answer(make_request(answer.request_id, request.wire, output))
    if request.candidates:
        for choice, best in zip(request.choices or [request], sorted(answers, key=rank), strict=False):
            choice.take_answer(best)


def _restricted(request: Request, capacity: int, index: int) -> list[int]:
    """The output under its rules, from their definition alone."""
    wire, output = request.wire, []  # type: tuple[dict[str, Any], list[int]]
    form = Form.parse(wire["structured"]["regex"]) if "structured" in wire else None
    temperature, seed = wire.get("temperature", 0.0), wire.get("seed", 0) + index
    while len(output) < capacity and END not in output:
        context = [*request.prompt, *output]
        [token] = expected_tokens(context, 1, VOCAB_SIZE, temperature=temperature, seed=seed)
        if "presence_penalty" in wire:
            token = _moved(token, sum(output))
        if form is not None:
            may_follow = form.allows(len(output), sum_of(output))
            while not may_follow[token]:
                token = (token + 1) % VOCAB_SIZE
        output.append(token)
    return output


def penalized(sequence: Sequence, token: int) -> int:
    """With a presence penalty: moved on by the sum of the tokens that the answer has, as they were counted."""
    if not sequence.params.presence_penalty:
        return token
    counts = count_tokens(sequence)
    return _moved(token, int(counts.ids @ counts.in_output.astype(np.int64)))


def _moved(token: int, distance: int) -> int:
    return (token - 1 + distance) % (VOCAB_SIZE - 1) + 1
