"""Rotary position embeddings of a model, and their tables (Su et al. 2021, "RoFormer")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .families import FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYER_TYPES = {"full_attention", "sliding_attention"}
_USUAL = {"rope_type": "default", "rope_theta": 1e4}  # in families whose configs do not say


class Rope(NamedTuple):
    """A rotary embedding (Su et al. 2021): the rotation of each pair of channels from one position to the next."""

    frequencies: torch.Tensor  # float32 [rotary_dim / 2], radians
    scaling: float  # factor on cosines and sines

    def tables(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 [num_positions, rotary_dim / 2]."""
        angles = torch.arange(num_positions, dtype=torch.float)[:, None] * self.frequencies
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def find_ropes(config: PretrainedConfig) -> list[Rope]:
    """The rotary embeddings of the layers, as numbered by ``DecoderSpec.ropes``, with transformers' own frequencies."""
    ropes = [_find_rope(config, parameters, layer_type) for layer_type, parameters in rope_parameters(config).items()]
    sign = -1 if FAMILIES[config.model_type].turns_back else 1
    return [Rope(sign * frequencies, scaling) for frequencies, scaling in ropes]


def _find_rope(config: PretrainedConfig, parameters: Mapping[str, Any], layer_type: str | None) -> Rope:
    if parameters["rope_type"] == "default":
        size = rotary_dim(config)
        exponents = torch.arange(0, size, 2, dtype=torch.float) / size
        return Rope(1.0 / (parameters["rope_theta"] ** exponents), 1.0)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # here: a proven decoder starts without it

    of_layers = {} if layer_type is None else {"layer_type": layer_type}
    return Rope(*ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, **of_layers))


def rope_parameters(config: PretrainedConfig) -> dict[str | None, Mapping[str, Any]]:
    """Rotary parameters by type of layer; None: all layers. Empty if positions are not rotary."""
    if not FAMILIES[config.model_type].may_turn:
        return {}
    parameters = getattr(config, "rope_parameters", _USUAL) or {}
    if not LAYER_TYPES & parameters.keys():
        has_alpha = FAMILIES[config.model_type].has_ntk_alpha and bool(parameters.get("alpha"))
        return {None: _with_fixed_base(config, parameters) if has_alpha else parameters}
    # Settings stated for no type of layer may lie beside these; transformers does not use them.
    return {key: value for key, value in sorted(parameters.items()) if isinstance(value, Mapping) and value}


def _with_fixed_base(config: PretrainedConfig, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters whose frequencies are those that an alpha stretches: a larger base for all sequence lengths alike."""
    size = head_dim(config)
    base = parameters["rope_theta"] * parameters["alpha"] ** (size / (size - 2))
    return {"rope_type": "default", "rope_theta": base}


def head_dim(config: PretrainedConfig) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def rotary_dim(config: PretrainedConfig) -> int:
    """The number of channels per head that are rotated."""
    if channels := getattr(config, FAMILIES[config.model_type].rotary_channels, None):
        return int(channels)
    factors = {rope.get("partial_rotary_factor", 1.0) for rope in rope_parameters(config).values()}
    return int(head_dim(config) * max(factors, default=1.0))
