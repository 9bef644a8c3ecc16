"""Layers with a state space in place of attention or beside it: their sizes, and the names and shapes of their tensors.

Source: Mamba-2, Dao and Gu 2024, "Transformers are SSMs", arXiv 2405.21060; names follow transformers' bamba.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from .delta import Part

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BESIDE_ATTENTION = "hybrid"  # transformers' name
LAYER_TYPES = {"linear_attention", "mamba", BESIDE_ATTENTION}  # older versions of transformers call the first "mamba"


class StateSpaceTensors(NamedTuple):
    """The names of one layer's tensors, except those it shares with attention layers."""

    projection: str  # gates, channels of the convolution, and the dt of each head
    output: str
    convolution: str
    convolution_biases: str
    rates: str  # logarithms of the rates of decay; a vector, not named ``.weight``
    dt_biases: str  # likewise
    skips: str  # likewise
    norm: str  # of the outputs


class Settings(NamedTuple):
    """The names of a family's settings; "": it has none."""

    num_heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    num_groups: str = "mamba_n_groups"
    state_size: str = "mamba_d_state"
    conv_size: str = "mamba_d_conv"
    has_convolution_bias: str = "mamba_conv_bias"
    has_bias: str = "mamba_proj_bias"  # of the projection
    has_output_bias: str = "mamba_proj_bias"
    has_norm: str = ""  # otherwise there is one
    norms_first: str = ""
    input_multiplier: str = ""
    multipliers: str = ""  # of gates, x, B, C and dt


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceSpec:
    """Sizes shared by all such layers of a model."""

    num_heads: int
    head_dim: int
    num_groups: int  # of heads, with the same B and C
    state_size: int
    conv_size: int  # tokens that the convolution sees
    norm_size: int  # outputs are normed in groups of so many channels; 0: they are only gated
    norms_first: bool  # before they are gated
    has_convolution_bias: bool
    has_bias: bool  # of the projection
    has_output_bias: bool
    gate_multiplier: float  # of the gates of outputs
    dt_multiplier: float
    channel_multipliers: tuple[float, float, float]  # of what the convolution reads: x, B and C

    @property
    def num_outputs(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: x of each head, B and C of each group."""
        return self.num_outputs + 2 * self.num_groups * self.state_size

    @property
    def channel_sizes(self) -> tuple[int, int, int]:
        """Number of channels of x, B and C."""
        return self.num_outputs, self.num_groups * self.state_size, self.num_groups * self.state_size

    @property
    def state_sizes(self) -> tuple[int, int]:
        """Number of elements of a sequence's state in one layer: those of the heads, and inputs of the convolution."""
        return self.num_outputs * self.state_size, (self.conv_size - 1) * self.num_channels

    @property
    def inputs(self) -> list[Part]:
        """How the rows of the projection before those of dt map to the channels, followed by the output gates."""
        return [Part(self.num_outputs, self.num_channels), Part(self.num_channels, 0)]

    def matrices(self, names: StateSpaceTensors, hidden_size: int) -> Iterator[tuple[str, tuple[int, int], bool]]:
        """Yield the matrices with their shapes, and whether they have a bias."""
        num_rows = self.num_outputs + self.num_channels + self.num_heads
        yield names.projection, (num_rows, hidden_size), self.has_bias
        yield names.output, (hidden_size, self.num_outputs), self.has_output_bias

    def shapes(self, names: StateSpaceTensors) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the other tensors with their shapes."""
        yield names.convolution, (self.num_channels, 1, self.conv_size)
        if self.has_convolution_bias:
            yield names.convolution_biases, (self.num_channels,)
        for name in (names.rates, names.dt_biases, names.skips):
            yield name, (self.num_heads,)
        if self.norm_size:
            yield names.norm, (self.num_outputs,)


def state_space_tensors(module: str) -> StateSpaceTensors:
    return StateSpaceTensors(
        projection=f"{module}.in_proj.weight",
        output=f"{module}.out_proj.weight",
        convolution=f"{module}.conv1d.weight",
        convolution_biases=f"{module}.conv1d.bias",
        rates=f"{module}.A_log",
        dt_biases=f"{module}.dt_bias",
        skips=f"{module}.D",
        norm=f"{module}.norm.weight",
    )


def describe_state_space(config: PretrainedConfig, settings: Settings) -> StateSpaceSpec:
    def get(setting: str, otherwise: Any) -> Any:
        return getattr(config, setting) if setting else otherwise

    num_heads, head_dim = getattr(config, settings.num_heads), getattr(config, settings.head_dim)
    num_groups = getattr(config, settings.num_groups)
    factor = get(settings.input_multiplier, 1.0)
    gates, x, b, c, dt = (factor * each for each in get(settings.multipliers, [1.0] * 5))
    return StateSpaceSpec(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=getattr(config, settings.state_size),
        conv_size=getattr(config, settings.conv_size),
        norm_size=num_heads * head_dim // num_groups if get(settings.has_norm, True) else 0,
        norms_first=bool(get(settings.norms_first, False)),
        has_convolution_bias=bool(getattr(config, settings.has_convolution_bias)),
        has_bias=bool(getattr(config, settings.has_bias)),
        has_output_bias=bool(getattr(config, settings.has_output_bias)),
        gate_multiplier=gates,
        dt_multiplier=dt,
        channel_multipliers=(x, b, c),
    )


def why_no_state_space(config: PretrainedConfig, settings: Settings) -> str | None:
    """What the kernels cannot compute in such layers of a model with this config."""
    limits = getattr(config, "time_step_limit", None)
    if limits and tuple(limits) != (0.0, inf):  # transformers applies them to prompts, but not to tokens it decodes
        return f"its time steps are limited to {limits}"
    has_multiplier = bool(settings.input_multiplier) and getattr(config, settings.input_multiplier) != 1
    if has_multiplier and getattr(config, settings.has_bias):
        return "its state spaces have multipliers of inputs, and biases that they do not apply to"
    return None
