"""How likely the model found the tokens of a prompt, as a caller reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..protocol.scores import NO_TOKEN, ScoreColumns


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """The logprob of one prompt token, given the tokens before it."""

    logprob: float
    rank: int  # 1: no token was more likely
    alternatives: list[tuple[int, float]]  # (token id, logprob) of the most likely tokens, best first, as requested


def read_prompt_logprobs(summary: Mapping[str, Any]) -> list[PromptLogprob | None] | None:
    """An entry for each token of the prompt, None for the first; None if they were not asked for."""
    if "prompt_logprobs" not in summary:
        return None
    columns = ScoreColumns.from_wire(summary["prompt_logprobs"])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [None, *(PromptLogprob(logprob, rank, _pairs(ids, values)) for logprob, rank, ids, values in rows)]


def _pairs(ids: list[int], values: list[float]) -> list[tuple[int, float]]:
    return [(i, value) for i, value in zip(ids, values, strict=True) if i != NO_TOKEN]
