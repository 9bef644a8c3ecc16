"""Requests with several sequences: the expected answer of each, and which of them are the choices.

The expected hypotheses of a beam search come from the search rules and the hash model's definition, without pages,
steps and preemptions.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from tests.simulation.requests import Request, make_request
from tests.workers.execute.factories import expected_hypotheses, make_beams
from triptych.protocol.errors import RequestTooLong
from triptych.protocol.model_card import ModelCard
from triptych.protocol.sampling import SamplingParams
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import expected_tokens, logprob_of, state_of
from triptych.workers.prepare.admission import fit

MAX_SIZE = 4
SEARCH_FIELDS = ("max_tokens", "seed", "stop_token_ids", "priority", "cache_salt", "deadline_ms", "max_queue_ms")
SEARCH_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"early_stopping": True},
    {"early_stopping": "never", "length_penalty": 2.0},
    {"length_penalty": -0.5},
)


def make_group(dice: random.Random, request: Request, card: ModelCard, *, max_records: int) -> None:
    """Give a plain request several sequences: samples, the best of several, or beams. Others stay plain."""
    if not request.is_valid or request.is_killer:
        return
    size = dice.randrange(2, min(MAX_SIZE, card.max_live, max_records) + 1)
    num_choices = dice.randrange(1, size + 1)
    options = dice.choice(SEARCH_OPTIONS)
    if dice.random() < 0.4 and _make_search(request, card, size, num_choices, options):
        return
    is_ranked = num_choices < size
    request.wire["n"] = num_choices
    if is_ranked or dice.random() < 0.3:
        request.wire["best_of"] = size
    sequences = _samples(request, card, size)
    if is_ranked:
        _let_compete(request, sequences, sorted(sequences, key=rank), num_choices)
    else:
        request.sequences = request.choices = sequences
        request.kin = [request, *sequences]


def _samples(request: Request, card: ModelCard, size: int) -> list[Request]:
    """Each gives the answer of a plain request with its seed."""
    wire, prompt = request.wire, request.prompt
    capacity = min(wire["max_tokens"], card.max_model_len - len(prompt))
    temperature, seed = wire.get("temperature", 0.0), wire.get("seed", 0)
    answers = [
        expected_tokens(prompt, capacity, VOCAB_SIZE, temperature=temperature, seed=seed + index)
        for index in range(size)
    ]
    return _sequences(request, answers)


def _sequences(request: Request, answers: list[list[int]]) -> list[Request]:
    ids = [f"{request.request_id} {index}" for index in range(len(answers))]
    return [make_request(name, request.wire, output) for name, output in zip(ids, answers, strict=True)]


def rank(sequence: Request) -> tuple[bool, float]:
    """Lowest first, by the mean logprob as stored in the journal; ties in order of creation."""
    if not sequence.token_ids:
        return True, 0.0
    tokens, logprobs = list(sequence.prompt), []
    for token_id in sequence.token_ids:
        logprobs.append(float(np.float32(logprob_of(state_of(tokens), token_id, VOCAB_SIZE))))
        tokens.append(token_id)
    return False, -sum(logprobs) / len(logprobs)


def _make_search(
    request: Request, card: ModelCard, size: int, num_choices: int, options: dict[str, Any]
) -> bool:  # fmt: skip
    """Make it a beam search; returns whether there are enough pages for one."""
    kept = {name: request.wire[name] for name in SEARCH_FIELDS if name in request.wire}
    wire = {"prompt_token_ids": request.prompt, **kept, "n": num_choices, "num_beams": size, **options}
    params = SamplingParams(max_tokens=wire["max_tokens"], num_beams=size)
    try:
        capacity = fit(np.array(request.prompt, np.int32), params, card)
    except RequestTooLong:
        return False
    request.wire = wire
    answers: list[list[int]] = [[]] * size
    if capacity:
        stop_ids = frozenset({0, *wire.get("stop_token_ids", ())})
        num_tokens = len(request.prompt)
        beam, *_ = make_beams(0, size, num_tokens=num_tokens, max_tokens=capacity, stop_ids=stop_ids, **options)
        beam.tokens[:num_tokens] = request.prompt
        answers = [hypothesis.tokens for hypothesis in expected_hypotheses(beam, VOCAB_SIZE)]
    sequences = _sequences(request, answers)
    _let_compete(request, sequences, sequences, num_choices)
    return True


def _let_compete(request: Request, sequences: list[Request], ranked: list[Request], num_choices: int) -> None:
    """The best of ``ranked`` are the choices. If one of them fails or is aborted, this may change every choice."""
    request.sequences = request.candidates = sequences
    if num_choices == 1:
        best = ranked[0]
        request.token_ids, request.text, request.reason = best.token_ids, best.text, best.reason
    else:
        request.choices = [
            replace(ranked[index], request_id=f"{request.request_id} {index}", candidates=sequences)
            for index in range(num_choices)
        ]
    family = [request, *sequences, *request.choices]
    for each in family:
        each.kin = family
