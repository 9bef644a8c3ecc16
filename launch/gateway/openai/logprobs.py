"""Logprobs in the formats of OpenAI and vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ....driver.prompt_logprobs import PromptLogprob
from ....driver.stream import Completion, Delta, Logprobs
from ..reasoning.content import ContentTokens
from ..requests.token_ids import prompt_ids
from ..requests.words import Words

LEAST = -9999.0  # replaces minus infinity, which JSON cannot express


def chat_logprobs(words: Words, token_ids: Sequence[int], rows: Logprobs) -> list[dict[str, Any]]:
    """One entry per token, with its bytes and the alternatives."""
    return [
        {**_entry(words, token_id, logprob), "top_logprobs": [_entry(words, *other) for other in others]}
        for token_id, (logprob, others) in zip(token_ids, rows, strict=True)
    ]


def content_logprobs(words: Words, tokens: ContentTokens, piece: Completion | Delta) -> list[dict[str, Any]]:
    """Of more of an answer, those now known to belong to its content; none if the request wants none."""
    if piece.logprobs is None:
        return []
    return tokens.push(piece.token_ids, chat_logprobs(words, piece.token_ids, piece.logprobs))


def _entry(words: Words, token_id: int, logprob: float) -> dict[str, Any]:
    content = words.bytes_of(token_id)
    return {"token": content.decode("utf-8", "replace"), "logprob": max(LEAST, logprob), "bytes": list(content)}


def completion_logprobs(
    words: Words, token_ids: Sequence[int], rows: Logprobs, offsets: Sequence[int]
) -> dict[str, Any]:
    """As columns. ``offsets``: where each token begins in the text."""
    return {
        "tokens": [words.text_of(token_id) for token_id in token_ids],
        "token_logprobs": [max(LEAST, logprob) for logprob, _ in rows],
        "top_logprobs": [_by_text(words, others) for _, others in rows],
        "text_offset": list(offsets),
    }


def echo_logprobs(words: Words, first: Completion, offsets: Sequence[int], *, top: int) -> dict[str, Any]:
    """The same for the prompt, from its first choice. The first token has no logprob."""
    scores = first.prompt_logprobs or []
    return {
        "tokens": [words.text_of(token_id) for token_id in prompt_ids(first.summary)],
        "token_logprobs": [None if score is None else max(LEAST, score.logprob) for score in scores],
        "top_logprobs": [None if score is None else _by_text(words, score.alternatives[:top]) for score in scores],
        "text_offset": list(offsets),
    }


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The columns of one text, followed by those of another."""
    return {name: column + second[name] for name, column in first.items()}


def prompt_logprobs(words: Words, first: Completion, *, top: int) -> list[dict[str, Any] | None]:
    """vLLM's format: per prompt token, a map of it and the likeliest by token id; None for the first."""
    scores = first.prompt_logprobs or []
    return [
        None if score is None else _ranked(words, token_id, score, top)
        for token_id, score in zip(prompt_ids(first.summary), scores, strict=True)
    ]


def _ranked(words: Words, token_id: int, score: PromptLogprob, top: int) -> dict[str, Any]:
    found = {token_id: (score.logprob, score.rank)}
    found |= {other: (logprob, rank) for rank, (other, logprob) in enumerate(score.alternatives[:top], 1)}
    return {
        str(each): {"logprob": max(LEAST, logprob), "rank": rank, "decoded_token": words.text_of(each)}
        for each, (logprob, rank) in found.items()
    }


def _by_text(words: Words, pairs: Iterable[Sequence[Any]]) -> dict[str, float]:
    """Alternatives by their text. If several look the same, such as incomplete characters, the likeliest counts."""
    found: dict[str, float] = {}
    for token_id, logprob in pairs:
        found.setdefault(words.text_of(token_id), max(LEAST, logprob))
    return found
