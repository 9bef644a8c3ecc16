"""What a config says about each layer: how it sees previous tokens, which positions it uses, whether it has experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .delta_spec import LAYER_TYPE
from .families import FAMILIES
from .ropes import LAYER_TYPES, rope_parameters
from .state_space_spec import BESIDE_ATTENTION
from .state_space_spec import LAYER_TYPES as STATE_SPACES

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_CONVOLUTION, _MLP, _EXPERTS = "conv", "mlp", "moe"  # transformers' names of types of layers
_SAME_TYPES = {"global": "full_attention", "local": "sliding_attention"}  # older names


class Unsupported(Exception):
    """The fast path cannot compute this model; the text says why."""


def layer_types(config: PretrainedConfig) -> list[str]:
    family = FAMILIES[config.model_type]
    default = "sliding_attention" if family.slides_everywhere and _window(config) else "full_attention"
    stated = getattr(config, family.layer_types, None) or [default] * config.num_hidden_layers
    types = [_SAME_TYPES.get(kind, kind) for kind in stated]
    known = LAYER_TYPES | ({LAYER_TYPE} if family.has_delta_rules else set())
    known |= {_CONVOLUTION} if family.has_short_convolutions else set()
    known |= STATE_SPACES if family.state_spaces else set()
    known |= {_MLP, _EXPERTS} if family.separates_mlps else set()
    if not known.issuperset(types):
        raise Unsupported(f"it has layers of type {', '.join(sorted(set(types) - known))}")
    return types


def recurrent_layers(config: PretrainedConfig) -> tuple[bool, ...]:
    """Whether each layer keeps a state: it has a delta rule, a short convolution or a state space."""
    return tuple(kind in {LAYER_TYPE, _CONVOLUTION, *STATE_SPACES} for kind in layer_types(config))


def attending_layers(config: PretrainedConfig) -> tuple[bool, ...]:
    return tuple(kind in {*LAYER_TYPES, BESIDE_ATTENTION} for kind in layer_types(config))


def layers_with_mlp(config: PretrainedConfig) -> tuple[bool, ...]:
    """Whether each layer has an MLP, or experts in place of it."""
    separates = FAMILIES[config.model_type].separates_mlps
    return tuple(not separates or kind in (_MLP, _EXPERTS) for kind in layer_types(config))


def has_experts(config: PretrainedConfig) -> tuple[bool, ...]:
    """Whether each layer has experts."""
    layers = range(config.num_hidden_layers)
    if not (family := FAMILIES[config.model_type]).has_experts:
        return (False,) * len(layers)
    count, step = num_experts(config), getattr(config, family.expert_step, 1)
    first, last = getattr(config, family.first_experts, 0), getattr(config, family.last_experts, len(layers))
    without = getattr(config, "mlp_only_layers", None) or ()
    if family.lists_expert_layers:
        without = [layer for layer in layers if config.mlp_layer_types[layer] != "sparse"]
    if family.separates_mlps:
        without = [layer for layer in layers if layer_types(config)[layer] != _EXPERTS]
    found = tuple(
        layer not in without and first <= layer <= last and (layer + 1) % step == 0 and count > 0 for layer in layers
    )
    if any(found) and not 0 < config.num_experts_per_tok <= count:
        raise Unsupported(f"a token has {config.num_experts_per_tok} of {count} experts")
    if any(found) and (getattr(config, "n_group", None) or 1) != 1:
        raise Unsupported(f"its experts are in {config.n_group} groups")
    return found


def num_experts(config: PretrainedConfig) -> int:
    """The number of experts of a layer that has any."""
    count: int = getattr(config, FAMILIES[config.model_type].num_experts)
    return count


def expert_size(config: PretrainedConfig) -> int:
    """The intermediate size of an expert."""
    name = "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size"
    size: int = getattr(config, name)
    return size


def shared_size(config: PretrainedConfig) -> int:
    """The intermediate size of the shared expert; 0: there is none."""
    family = FAMILIES[config.model_type]
    if family.num_shared_experts:
        return expert_size(config) * (getattr(config, family.num_shared_experts) or 0)
    size: int = getattr(config, family.shared_size) if family.shared_size else 0
    return size


def windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    return tuple(_window(config) if kind == "sliding_attention" else None for kind in layer_types(config))


def _window(config: PretrainedConfig) -> int | None:
    window: int | None = getattr(config, FAMILIES[config.model_type].window, None)
    return window


def num_kv_heads(config: PretrainedConfig) -> int:
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    count: int = getattr(config, FAMILIES[config.model_type].kv_heads, config.num_attention_heads)
    return count


def rope_numbers(config: PretrainedConfig) -> tuple[int | None, ...]:
    family, count = FAMILIES[config.model_type], len(layer_types(config))
    if not family.may_turn or (family.may_lack_positions and config.position_embedding_type != "rope"):
        return (None,) * count
    numbers = {layer_type: number for number, layer_type in enumerate(rope_parameters(config))}
    if None not in numbers:
        types = layer_types(config)
        if missing := set(types) - numbers.keys():
            raise Unsupported(f"it has no rotary positions for layers of type {', '.join(sorted(missing))}")
        return tuple(numbers[layer_type] for layer_type in types)
    if family.turns_where_it_slides and config.sliding_window:
        return tuple(0 if kind == "sliding_attention" else None for kind in layer_types(config))
    turns = getattr(config, "no_rope_layers", [1] * count)[:count]  # despite the name, 1 means that a layer has rope
    if len(turns) < count:
        raise Unsupported(f"its no_rope_layers says of {len(turns)} of {count} layers whether they turn")
    attends = attending_layers(config)
    return tuple(0 if turns[layer] and attends[layer] else None for layer in range(count))


def query_growth(config: PretrainedConfig) -> tuple[float, int]:
    """Return the factor, and the span of positions over which queries are scaled alike.

    Source: Llama 4 blog post, Meta 2025, "inference time temperature".
    """
    if not FAMILIES[config.model_type].grows_queries:
        return 0.0, 1
    return config.rope_parameters["llama_4_scaling_beta"], config.rope_parameters["original_max_position_embeddings"]
