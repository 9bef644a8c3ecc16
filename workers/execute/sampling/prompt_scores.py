"""Scores of prompt tokens: the raw log-softmax of the rows before them, which is computed in parts and discarded."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from ....protocol.scores import ScoreColumns
from ..step import PromptScores, PromptSpan

_PART = 1 << 22  # logits whose log-softmax exists at once


def score_prompts(logits: torch.Tensor, scored: Rows[PromptSpan]) -> list[PromptScores]:
    """Scores of each span, from float32 [C, V] with a row for each of their tokens, in order."""
    found: list[PromptScores] = []
    first = 0
    for span in scored:
        rows = logits[first : first + span.num_rows]
        found.append(PromptScores(span.sequence.key, span.start, _columns(rows, span)))
        first += span.num_rows
    return found


def _columns(logits: torch.Tensor, span: PromptSpan) -> ScoreColumns:
    targets = torch.from_numpy(span.targets).to(logits.device, torch.int64)[:, None]
    count = min(span.sequence.params.prompt_logprobs or 0, logits.shape[1])
    size = max(1, _PART // logits.shape[1])
    parts = [_part(logits[i : i + size], targets[i : i + size], count) for i in range(0, len(logits), size)]
    return ScoreColumns(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _part(logits: torch.Tensor, targets: torch.Tensor, count: int) -> ScoreColumns:
    raw = logits.log_softmax(dim=-1)
    chosen = raw.gather(1, targets)
    ranks = (raw > chosen).sum(dim=-1, dtype=torch.int32) + 1
    best = raw.topk(count)
    return ScoreColumns(
        chosen[:, 0].cpu().numpy(), ranks.cpu().numpy(), best.indices.int().cpu().numpy(), best.values.cpu().numpy()
    )
