"""The tokens of a prompt, and how likely the model found them, in a form for callers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..protocol.scores import NO_TOKEN, ScoreColumns


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """One token's likelihood, given those before it."""

    logprob: float
    rank: int  # 1: the likeliest token
    alternatives: list[tuple[int, float]]  # (token id, logprob) of the likeliest, best first, as many as requested


def read_prompt_ids(summary: Mapping[str, Any]) -> list[int] | None:
    """The token ids of the prompt, after truncation; None if they were not requested."""
    packed = summary.get("prompt_token_ids")
    return None if packed is None else [int(token_id) for token_id in np.frombuffer(packed, "<i4")]


def read_prompt_logprobs(summary: Mapping[str, Any]) -> list[PromptLogprob | None] | None:
    """One entry per token of the prompt, None for the first; None if they were not requested."""
    if "prompt_logprobs" not in summary:
        return None
    columns = ScoreColumns.from_wire(summary["prompt_logprobs"])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [None, *(PromptLogprob(logprob, rank, _pairs(ids, values)) for logprob, rank, ids, values in rows)]


def _pairs(ids: list[int], values: list[float]) -> list[tuple[int, float]]:
    return [(i, value) for i, value in zip(ids, values, strict=True) if i != NO_TOKEN]
