"""Layers with a gated delta rule in place of attention: their sizes, and the names and shapes of their tensors.

Source: "Gated Delta Networks", Yang et al. 2024, arXiv 2412.06464; names follow transformers' qwen3_5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYER_TYPE = "linear_attention"  # transformers' name


class DeltaTensors(NamedTuple):
    """The names of one layer's tensors, except those it shares with attention layers."""

    gates: tuple[str, ...]  # betas and decay rates, a row per value head; or one matrix that holds both
    convolution: str
    rates: str  # logarithms of the factors of the decay rates; a vector, not named ``.weight``
    rate_biases: str  # a vector as well
    norm: str  # of the outputs


class Part(NamedTuple):
    """Consecutive rows of a matrix, and where the first of them belongs."""

    num_rows: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """Sizes shared by all such layers of a model."""

    num_key_heads: int  # also the number of query heads
    num_value_heads: int  # a multiple of num_key_heads
    key_dim: int
    value_dim: int
    conv_size: int  # tokens that the convolution sees
    # Queries, keys, values and output gates are one matrix, ordered by key head: all rows of one head, then those of
    # the next. So are betas and decay rates.
    is_by_heads: bool

    @property
    def num_outputs(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_outputs

    @property
    def state_sizes(self) -> tuple[int, int]:
        """Number of elements of a sequence's state in one layer: the map from keys to values, and the inputs of the
        convolution.
        """
        return self.num_outputs * self.key_dim, (self.conv_size - 1) * self.num_channels

    @property
    def inputs(self) -> list[Part]:
        """How the rows of the matrices before the convolution map to its channels, followed by the output gates."""
        key, keys, values = self.key_dim, self.num_key_heads * self.key_dim, self.num_outputs // self.num_key_heads
        if not self.is_by_heads:
            return [Part(self.num_channels, 0), Part(self.num_outputs, self.num_channels)]
        return [
            part
            for head in range(self.num_key_heads)
            for part in (
                Part(key, head * key),
                Part(key, keys + head * key),
                Part(values, 2 * keys + head * values),
                Part(values, self.num_channels + head * values),
            )
        ]

    def gates(self, behind: int) -> list[Part]:
        """How the rows of betas and decay rates map to their places, with the rates starting at ``behind``."""
        group = self.num_value_heads // self.num_key_heads
        if not self.is_by_heads:
            return [Part(self.num_value_heads, 0), Part(self.num_value_heads, behind)]
        return [Part(group, first + head * group) for head in range(self.num_key_heads) for first in (0, behind)]

    def shapes(self, names: DeltaTensors, hidden_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name in names.gates:
            yield name, (2 * self.num_value_heads // len(names.gates), hidden_size)
        yield names.convolution, (self.num_channels, 1, self.conv_size)
        yield names.rates, (self.num_value_heads,)
        yield names.rate_biases, (self.num_value_heads,)
        yield names.norm, (self.value_dim,)


def delta_modules(*, is_by_heads: bool) -> tuple[tuple[str, ...], str]:
    """The modules of a layer before and after its delta rule."""
    names = ["in_proj_qkvz"] if is_by_heads else ["in_proj_qkv", "in_proj_z"]
    return tuple(f"linear_attn.{name}" for name in names), "linear_attn.out_proj"


def delta_tensors(module: str, *, is_by_heads: bool) -> DeltaTensors:
    return DeltaTensors(
        gates=tuple(f"{module}.in_proj_{name}.weight" for name in (["ba"] if is_by_heads else ["b", "a"])),
        convolution=f"{module}.conv1d.weight",
        rates=f"{module}.A_log",
        rate_biases=f"{module}.dt_bias",
        norm=f"{module}.norm.weight",
    )


def describe_delta(config: PretrainedConfig, *, is_by_heads: bool) -> DeltaSpec:
    return DeltaSpec(
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_size=config.linear_conv_kernel_dim,
        is_by_heads=is_by_heads,
    )
