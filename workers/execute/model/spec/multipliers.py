"""Factors of what the parts of a layer read and write, in families that are trained with them.

Source: "Tensor Programs V", Yang et al. 2022, arXiv 2203.03466 (muP).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .families import FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Those of state spaces are in ``StateSpaceSpec``."""

    scores: float = 1.0  # of attention
    attended: float = 1.0  # what attention adds to x
    space: float = 1.0  # what a state space adds
    gates: float = 1.0  # of MLPs, before their activation
    gated: float = 1.0  # what an MLP adds


def find_multipliers(config: PretrainedConfig) -> Multipliers:
    if not FAMILIES[config.model_type].has_multipliers:
        return Multipliers()
    inputs = config.attention_in_multiplier  # of queries, keys and values
    gates, gated = config.mlp_multipliers
    return Multipliers(
        scores=inputs * inputs * config.key_multiplier,
        attended=inputs * config.attention_out_multiplier,
        space=config.ssm_out_multiplier,
        gates=gates,
        gated=gated,
    )


def why_no_multipliers(config: PretrainedConfig) -> str | None:
    """What the kernels cannot compute in a model with this config."""
    if FAMILIES[config.model_type].has_multipliers and config.attention_bias and config.attention_in_multiplier != 1:
        return "its attention has multipliers of inputs, and biases that they do not apply to"
    return None
