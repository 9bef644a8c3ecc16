"""Whether this model and page pool can serve a prompt, and how many tokens may follow it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...protocol.arrays import Int32
from ...protocol.errors import InvalidRequest, RequestTooLong
from ...protocol.model_card import ModelCard
from ...protocol.sampling import SamplingParams
from ...protocol.scores import MAX_SCORE_BYTES, score_words
from .request import GenerationRequest, Truncation


class Truncated(NamedTuple):
    """What is left of a prompt."""

    token_ids: Int32
    num_truncated: int


class Admission(NamedTuple):
    """A prompt that can always be served, alone if need be: a queued request never turns out not to fit."""

    token_ids: Int32  # [num_prompt_tokens]
    num_truncated: int  # tokens cut from the prompt
    capacity: int  # output tokens this request may have
    embedding_size: int = 0  # see RequestRecord


def admit(
    token_ids: Int32,
    *,
    truncation: Truncation,
    params: SamplingParams,
    card: ModelCard,
    max_prompt_tokens: int | None = None,
    embedding_size: int = 0,
) -> Admission:
    """The prompt as it will run. ``max_prompt_tokens``: the request's own limit, if any. ``embedding_size``: of the
    embedding that it wants instead of an answer, see ``embedding_size_of``.

    Raises:
        InvalidRequest: an id in the prompt or the parameters is not in the model's vocabulary, or there are more
            sequences than can ever be live.
        RequestTooLong: the prompt does not fit and ``truncation`` is "none".
    """
    check_prompt_ids(token_ids, card.vocab_size)
    check_param_ids(params, card.vocab_size)
    check_group(params, card)
    kept, num_truncated = token_ids, 0
    if max_prompt_tokens is not None and len(token_ids) > max_prompt_tokens:
        if truncation == "none":
            raise RequestTooLong(
                f"prompt has {len(token_ids)} tokens, max_prompt_tokens is {max_prompt_tokens}", param="prompt"
            )
        kept, num_truncated = truncate(token_ids, max_prompt_tokens, truncation)
    if embedding_size:
        kept, num_more = truncate(kept, _context_tokens(card), truncation)
        _check_length(len(kept), _context_tokens(card), "the tokens that context and pages hold")
        return Admission(kept, num_truncated + num_more, 0, embedding_size)
    if len(kept) > longest_prompt(card):
        kept, num_more = truncate(kept, truncated_length(params, card), truncation)
        num_truncated += num_more
    check_scores(len(kept), params)
    return Admission(kept, num_truncated, fit(kept, params, card))


def embedding_size_of(request: GenerationRequest, card: ModelCard) -> int:
    """Values of the embedding that a request wants instead of an answer; 0: it wants none.

    Raises:
        InvalidRequest: the model cannot do what the request asks for.
    """
    params, size = request.sampling, card.embedding_size
    if not request.embedding:
        if not card.can_generate and (params.max_tokens != 0 or params.prompt_logprobs is not None):
            raise InvalidRequest("the model has no head, it only makes embeddings (embedding: true)", param="embedding")
        return 0
    if not size:
        raise InvalidRequest(
            f"embedding is true, but the model makes none: {card.why_no_embeddings}", param="embedding"
        )
    if request.dimensions is not None and request.dimensions > size:
        raise InvalidRequest(
            f"dimensions is {request.dimensions}, an embedding of the model has {size}", param="dimensions"
        )
    return request.dimensions or size


def with_instruction(request: GenerationRequest, card: ModelCard) -> GenerationRequest:
    """The request with the instruction in front of its text that it names, or that the checkpoint has by default.

    Raises:
        InvalidRequest: the checkpoint has no instruction with this name.
    """
    if not request.embedding or request.prompt is None:
        return request
    name = card.default_prompt if request.prompt_name is None else request.prompt_name
    if name and name not in card.prompts:
        known = ", ".join(card.prompts) or "none"
        raise InvalidRequest(f"prompt_name is {name!r:.200}, known are: {known}", param="prompt_name")
    return replace(request, prompt=card.prompts[name] + request.prompt) if name else request


def _check_length(num_tokens: int, limit: int, what: str) -> None:
    if num_tokens > limit:
        raise RequestTooLong(f"prompt has {num_tokens} tokens, the limit is {limit}, {what}", param="prompt")


def fit(token_ids: Int32, params: SamplingParams, card: ModelCard) -> int:
    """Output tokens that may follow this prompt: ``max_tokens``, or as many as context and pool have room for.

    Raises:
        RequestTooLong: there is no room for a single token.
    """
    _check_length(len(token_ids), longest_prompt(card), "one less than context and pages hold")
    room = _context_tokens(card) - len(token_ids)
    if params.is_beam_search:
        room = min(room, _beam_room(len(token_ids), params.num_beams, card))
    return room if params.max_tokens is None else min(params.max_tokens, room)


def _beam_room(num_prompt_tokens: int, num_beams: int, card: ModelCard) -> int:
    """Output tokens per beam such that the pool can hold all beams at once. They share the prompt's full pages.

    Raises:
        RequestTooLong: there is no room for a single token.
    """
    num_shared = num_prompt_tokens // card.page_size
    num_own = max(0, card.num_pages - num_shared) // num_beams
    room = (num_shared + num_own) * card.page_size - num_prompt_tokens
    if room < 1:
        raise RequestTooLong(
            f"prompt has {num_prompt_tokens} tokens, which leaves {num_own} pages for each of {num_beams} beams,"
            f" of {card.num_pages} pages of {card.page_size} tokens",
            param="num_beams",
        )
    return room


def check_group(params: SamplingParams, card: ModelCard) -> None:
    """Raise InvalidRequest if a request has more sequences than can be live."""
    sizes = {"n": params.n, "best_of": params.best_of or 1, "num_beams": params.num_beams}
    for param, size in sizes.items():
        if size > card.max_live:
            raise InvalidRequest(f"{param} is {size}, the limit is max_live, {card.max_live}", param=param)


def check_scores(num_prompt_tokens: int, params: SamplingParams) -> None:
    """Raise InvalidRequest if the logprobs of the prompt do not fit into one message."""
    num_bytes = 4 * score_words(num_prompt_tokens, params.prompt_logprobs)
    if num_bytes > MAX_SCORE_BYTES:
        raise InvalidRequest(
            f"prompt_logprobs is {params.prompt_logprobs}, which is {num_bytes} bytes for a prompt of"
            f" {num_prompt_tokens} tokens, the limit is {MAX_SCORE_BYTES}",
            param="prompt_logprobs",
        )


def longest_prompt(card: ModelCard) -> int:
    """The longest possible prompt: one token less than the context or the pool holds, so that one token can follow."""
    return _context_tokens(card) - 1


def truncated_length(params: SamplingParams, card: ModelCard) -> int:
    """The length to which a prompt that is too long is cut: leaves room for ``max_tokens``, at most half the context.

    A cut to the limit itself would leave room for a single output token.
    """
    context = _context_tokens(card)
    room = context if params.max_tokens is None else max(params.max_tokens, 1)
    return context - min(room, context // 2)


def truncate(token_ids: Int32, limit: int, how: Truncation) -> Truncated:
    """The prompt cut to ``limit`` tokens on the left, on the right or in the middle; "none" leaves it whole."""
    num_over = len(token_ids) - limit
    if num_over <= 0 or how == "none":
        return Truncated(token_ids, 0)
    if how == "left":
        return Truncated(token_ids[num_over:], num_over)
    if how == "right":
        return Truncated(token_ids[:limit], num_over)
    head = limit // 2
    return Truncated(np.concatenate([token_ids[:head], token_ids[head + num_over :]]), num_over)


def check_prompt_ids(token_ids: Int32, vocab_size: int) -> None:
    """Raise InvalidRequest for the first id that is not in the vocabulary."""
    foreign = (token_ids < 0) | (token_ids >= vocab_size)
    if foreign.any():
        index = int(foreign.argmax())
        raise InvalidRequest(
            f"prompt_token_ids[{index}] is {token_ids[index]}, the limits are 0 and {vocab_size - 1}",
            param="prompt_token_ids",
        )


def check_param_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest for the first token id in a parameter that is not in the vocabulary."""
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias, vocab_size)


def _check_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{param} holds {token_id}, the limits are 0 and {vocab_size - 1}", param=param)


def _context_tokens(card: ModelCard) -> int:
    return min(card.max_model_len, card.num_pages * card.page_size)
