"""Attention to latents in place of keys and values: its sizes, and the names and shapes of its tensors.

Source: "DeepSeek-V2", DeepSeek-AI 2024, arXiv 2405.04434, section 2.1; names follow transformers' deepseek_v3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NORM_EPS = 1e-6  # of the latents' norms; transformers has no setting for it, that of the config is for other norms


class LatentTensors(NamedTuple):
    """The names of one layer's tensors, except those it shares with other attention layers."""

    query_up: str  # makes queries of their latents
    query_norm: str
    norm: str
    up: str  # makes the plain channels of a head's key, and then its value, head by head


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Sizes shared by all layers of a model. A query has plain channels, and behind them those that are rotated. Keys
    are alike, but their rotated channels are the same for all heads.
    """

    rank: int  # channels of the latent of keys and values
    query_rank: int  # channels of that of queries; 0: queries have none
    plain_dim: int
    rotary_dim: int
    value_dim: int  # channels of a head's value
    norm_eps: float

    @property
    def cached_dim(self) -> int:
        """Channels that a page holds of a token as its key: the latent, and the rotated ones."""
        return self.rank + self.rotary_dim

    @property
    def head_dim(self) -> int:
        """Channels of a query."""
        return self.plain_dim + self.rotary_dim

    def input_sizes(self, num_heads: int) -> tuple[int, int]:
        """Output sizes of the projections of x: to queries or their latents, and to what is cached."""
        return self.query_rank or num_heads * self.head_dim, self.cached_dim

    def shapes(self, names: LatentTensors, num_heads: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        if self.query_rank:
            yield names.query_norm, (self.query_rank,)
            yield names.query_up, (num_heads * self.head_dim, self.query_rank)
        yield names.norm, (self.rank,)
        yield names.up, (num_heads * (self.plain_dim + self.value_dim), self.rank)


def latent_modules(latent: LatentSpec) -> tuple[str, str]:
    """The modules of a layer that project x."""
    return f"self_attn.{'q_a_proj' if latent.query_rank else 'q_proj'}", "self_attn.kv_a_proj_with_mqa"


def latent_tensors(module: str) -> LatentTensors:
    return LatentTensors(
        query_up=f"{module}.q_b_proj.weight",
        query_norm=f"{module}.q_a_layernorm.weight",
        norm=f"{module}.kv_a_layernorm.weight",
        up=f"{module}.kv_b_proj.weight",
    )


def describe_latents(config: PretrainedConfig) -> LatentSpec:
    return LatentSpec(
        rank=config.kv_lora_rank,
        query_rank=config.q_lora_rank or 0,
        plain_dim=config.qk_nope_head_dim,
        rotary_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        norm_eps=_NORM_EPS,
    )


def score_multiplier(config: PretrainedConfig, latent: LatentSpec) -> float:
    """The factor on scores, which are sharpened if positions are stretched.

    Source: "YaRN", Peng et al. 2023, arXiv 2309.00071, section 3.4, as transformers' deepseek_v3 applies it.
    """
    rope, multiplier = config.rope_parameters, latent.head_dim**-0.5
    of_all = rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not of_all or rope["factor"] <= 1:
        return float(multiplier)
    return float(multiplier * (0.1 * of_all * math.log(rope["factor"]) + 1.0) ** 2)
