"""What a config says about each layer: how it sees previous tokens, which positions it uses, whether it has experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .delta import LAYER_TYPE
from .families import FAMILIES
from .ropes import LAYER_TYPES, rope_parameters
from .state_space import BESIDE_ATTENTION
from .state_space import LAYER_TYPES as STATE_SPACES

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_CONVOLUTION, _MLP, _EXPERTS = "conv", "mlp", "moe"  # transformers' names of types of layers
_SAME_TYPES = {"global": "full_attention", "local": "sliding_attention"}  # older names
_GROUPS, _NO_GROUPS = "group_limited_greedy", "greedy"  # its names of methods to choose experts
_MOST_GROUPS = 64  # bits of a set of them, see kernels/src/experts.h


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
        without = [layer for layer, kind in enumerate(layer_types(config)) if kind != _EXPERTS]
    found = tuple(
        layer not in without and first <= layer <= last and (layer + 1) % step == 0 and count > 0 for layer in layers
    )
    if any(found) and not 0 < config.num_experts_per_tok <= count:
        raise Unsupported(f"a token has {config.num_experts_per_tok} of {count} experts")
    return found


class ExpertGroups(NamedTuple):
    """Experts in groups, of which a token first chooses some, and then experts in these."""

    num_groups: int
    num_chosen: int  # per token
    num_tops: int  # scores of its experts that are added up to that of a group


UNGROUPED = ExpertGroups(1, 1, 1)


def expert_groups(config: PretrainedConfig) -> ExpertGroups:
    """The groups of experts of which a token chooses some before it chooses experts.

    Source: "DeepSeek-V2", DeepSeek-AI 2024, arXiv 2405.04434, section 2.2.2; sums of two, "DeepSeek-V3", 2412.19437.
    """
    family, count = FAMILIES[config.model_type], getattr(config, "n_group", None) or 1
    method = getattr(config, family.groups_setting, _GROUPS)
    if method not in (_GROUPS, _NO_GROUPS):
        raise Unsupported(f"its {family.groups_setting} is {method}")
    if count == 1 or method == _NO_GROUPS:
        return UNGROUPED
    size, rest = divmod(num_experts(config), count)
    chosen, tops = getattr(config, "topk_group", 0), family.num_group_tops
    if not tops or rest or count > _MOST_GROUPS or not 0 < chosen <= count or size < tops:
        raise Unsupported(f"its {num_experts(config)} experts are in {count} groups, {chosen} of which are chosen")
    if chosen * size < config.num_experts_per_tok:
        raise Unsupported(f"a token has {config.num_experts_per_tok} experts of {chosen} groups of {size}")
    return ExpertGroups(count, chosen, tops)


def num_experts(config: PretrainedConfig) -> int:
    """The number of experts of a layer that has any."""
    count: int = getattr(config, FAMILIES[config.model_type].num_experts)
    return count


def windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    return tuple(_window(config) if kind == "sliding_attention" else None for kind in layer_types(config))


def _window(config: PretrainedConfig) -> int | None:
    window: int | None = getattr(config, FAMILIES[config.model_type].window, None)
    return window


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
