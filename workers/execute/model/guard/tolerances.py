"""Differences between logits, and the greatest that self-tests allow, relative to the greatest logit.

Families that work stay below half of them. What a decoder computes wrongly differs by about 1.
"""

from __future__ import annotations

import torch

TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 1e-1}  # by the type that is computed in
ROUNDED = 0.5  # of weights, activations, or keys and values in eight bits or fewer


def relative_difference(logits: torch.Tensor, expected: torch.Tensor, outliers: float = 0.0) -> float:
    """The greatest difference in rows [tokens, V], relative to the greatest expected logit; NaN if there is any NaN.

    ``outliers`` is the share of rows that are left out, those with the greatest differences.
    """
    rows = (logits - expected).abs().amax(dim=-1)
    greatest = rows.sort(descending=True).values[int(outliers * len(rows))]
    return float((greatest + 0 * rows.sum()) / expected.abs().max())
