"""Requests of simulated clients, and their expected answers, from the hash model's definition alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from triptych.protocol.model_card import ModelCard
from triptych.protocol.sampling import FIELD_NAMES, SamplingParams
from triptych.protocol.tokenizer_files import TokenizerFacts
from triptych.workers.execute.hash_build import VOCAB_SIZE, byte_tokenizer_json
from triptych.workers.execute.hash_lm import expected_tokens
from triptych.workers.prepare.text_encoder import TextEncoder
from triptych.workers.summarize.stream import OutputStream
from triptych.workers.summarize.vocabulary import Vocabulary

# The first token of a prompt determines what the request does to the workers.
POISON = VOCAB_SIZE - 1  # a step that computes it raises
EXECUTE_KILLER = VOCAB_SIZE - 2  # execute crashes at its nth token, n = prompt[1] % 3
PREPARE_KILLER = VOCAB_SIZE - 3  # prepare crashes


@dataclass(eq=False)
class Request:
    """One request, with its only right answer."""

    request_id: str
    wire: dict[str, Any]
    prompt: list[int]
    journaled: list[int]  # every token that execute may write to the journal for it
    token_ids: list[int]  # the answer's
    text: str
    reason: str  # "stop" | "length" | "error", unless it is aborted
    is_valid: bool = True
    may_abort: bool = False  # it was aborted, or not followed for as long as its lease
    may_be_unknown: bool = False  # another client may have read its answer
    was_refused: bool = False
    has_failed: bool = False  # one of its tokens could not be sampled
    num_killings: int = 0  # number of workers that it crashed
    then: Request | None = None  # the next request of its client, submitted when this one has ended
    by_adapter: dict[str, Request] = field(default_factory=dict)  # its answers, by the adapter's digest
    # For several sequences, see ``groups.py``:
    sequences: list[Request] = field(default_factory=list)  # by their ids in the journal
    choices: list[Request] = field(default_factory=list)  # by the ids that clients follow; empty if there is only one
    candidates: list[Request] = field(default_factory=list)  # for a choice, or the only one: the candidates
    kin: list[Request] = field(init=False, repr=False)  # itself, and all that share its fate

    def __post_init__(self) -> None:
        self.kin = [self]

    def take_answer(self, other: Request) -> None:
        self.journaled, self.token_ids = other.journaled, other.token_ids
        self.text, self.reason = other.text, other.reason

    @property
    def may_expire(self) -> bool:
        return "deadline_ms" in self.wire or "max_queue_ms" in self.wire

    @property
    def may_be_cut(self) -> bool:
        """Whether its answer may end anywhere."""
        return self.may_abort or self.may_expire or self.has_failed

    @property
    def is_poison(self) -> bool:
        return self.prompt[:1] == [POISON]

    @property
    def is_killer(self) -> bool:
        return self.reason == "poisoned"

    @property
    def is_beam_search(self) -> bool:
        return "num_beams" in self.wire


def num_tokens_before_death(prompt: list[int]) -> int:
    return prompt[1] % 3


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(byte_tokenizer_json())


@cache
def encoder() -> TextEncoder:
    facts = TokenizerFacts(vocab_size=VOCAB_SIZE, chat_template=None, special_tokens={}, bos_token_id=None)
    return TextEncoder(Tokenizer.from_str(byte_tokenizer_json()), facts)


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer())


def random_request(rng: random.Random, request_id: str, card: ModelCard, *, common: list[int]) -> Request:
    """Mostly ordinary requests; some that stop early, without tokens, with poison, or invalid.

    ``common``: a prefix of some prompts, so that they share pages.
    """
    prompt = [rng.randrange(1, VOCAB_SIZE - 1) for _ in range(rng.randrange(1, 14))]
    if rng.random() < 0.4:
        prompt = [*common, *prompt]
    prompt = [min(prompt[0], PREPARE_KILLER - 1), *prompt[1:]][: card.max_model_len - 1]
    chance = rng.random()
    if chance < 0.06:
        prompt[0] = POISON
    elif chance < 0.16 and len(prompt) > 1:
        return _killer(rng, request_id, [rng.choice((EXECUTE_KILLER, PREPARE_KILLER)), *prompt[1:]], card)
    sampling: dict[str, Any] = {"max_tokens": rng.choice((1, 3, 6, 9, 14))}
    if rng.random() < 0.04:
        sampling["max_tokens"] = 0
    if rng.random() < 0.4:
        sampling |= {"temperature": 1.0, "seed": rng.randrange(1000)}
    if rng.random() < 0.15:
        sampling["logprobs"] = rng.randrange(3)
    capacity = min(sampling["max_tokens"], card.max_model_len - len(prompt))
    output = expected_tokens(
        prompt, capacity, VOCAB_SIZE, temperature=sampling.get("temperature", 0.0), seed=sampling.get("seed", 0)
    )
    if output and rng.random() < 0.2:
        sampling["stop_token_ids"] = [rng.choice(output)]
    elif len(output) > 2 and rng.random() < 0.2:
        sampling["stop"] = [vocabulary().tokenizer.decode(output[1:3], skip_special_tokens=False)]
    wire: dict[str, Any] = {"prompt_token_ids": prompt, **sampling, **_circumstances(rng)}
    if rng.random() < 0.05:
        bad = rng.choice(({"top_p": 2.0}, {"nonsense": 1}, {"max_tokens": -1}, {"prompt_token_ids": [VOCAB_SIZE]}))
        return Request(request_id, {**wire, **bad}, prompt, [], [], "", "refused", is_valid=False)
    return make_request(request_id, wire, output)


def _killer(rng: random.Random, request_id: str, prompt: list[int], card: ModelCard) -> Request:
    num_said = num_tokens_before_death(prompt) if prompt[0] == EXECUTE_KILLER else 0
    capacity = min(num_said + rng.randrange(1, 4), card.max_model_len - len(prompt))
    wire = {"prompt_token_ids": prompt, "max_tokens": capacity, **_circumstances(rng)}
    output = expected_tokens(prompt, capacity, VOCAB_SIZE)
    request = make_request(request_id, wire, output[:num_said])
    if capacity > num_said:
        request.reason = "poisoned"
    return request


def _circumstances(rng: random.Random) -> dict[str, Any]:
    wire: dict[str, Any] = {}
    if rng.random() < 0.1:
        wire[rng.choice(("deadline_ms", "max_queue_ms"))] = rng.randrange(1, 200)
    if rng.random() < 0.2:
        wire["priority"] = rng.randrange(-3, 4)
    if rng.random() < 0.1:
        wire["cache_salt"] = rng.choice("ab")
    return wire


def make_request(request_id: str, wire: dict[str, Any], output: list[int]) -> Request:
    params = SamplingParams.from_wire({k: v for k, v in wire.items() if k in FIELD_NAMES})
    prompt = wire["prompt_token_ids"]
    if prompt[0] == POISON and output:
        return Request(request_id, wire, prompt, [], [], "", "error")
    least, has_form = max(1, params.min_tokens), "structured" in wire
    ends = [end for end, token in enumerate(output, 1) if end >= least and token in params.stop_token_ids]
    output = output[: min(ends, default=None)]
    stream = OutputStream(
        vocabulary(),
        params,
        stop_token_ids=frozenset({0, *params.stop_token_ids}),
        final_ids=frozenset({0} if has_form else ()),
        context=vocabulary().amid_text if has_form else (),
    )
    stream.push(output)
    stream.finish("length")
    return Request(request_id, wire, prompt, output, stream.token_ids, stream.text, stream.finish_reason or "")
