"""Logprobs in the two shapes that OpenAI has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...driver.stream import Logprobs
from .words import Words


def chat_logprobs(words: Words, token_ids: Sequence[int], rows: Logprobs) -> list[dict[str, Any]]:
    """An entry a token, with its bytes and the alternatives."""
    return [
        {**_entry(words, token_id, logprob), "top_logprobs": [_entry(words, *other) for other in others]}
        for token_id, (logprob, others) in zip(token_ids, rows, strict=True)
    ]


def _entry(words: Words, token_id: int, logprob: float) -> dict[str, Any]:
    content = words.bytes_of(token_id)
    return {"token": content.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(content)}


def completion_logprobs(words: Words, token_ids: Sequence[int], rows: Logprobs, *, offset: int) -> dict[str, Any]:
    """Columns. ``offset``: characters of text before the first of these tokens."""
    tokens = [words.text_of(token_id) for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [logprob for logprob, _ in rows],
        "top_logprobs": [{words.text_of(i): value for i, value in others} for _, others in rows],
        "text_offset": offsets,
    }
