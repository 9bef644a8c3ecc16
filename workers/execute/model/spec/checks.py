"""What the fast paths cannot compute: what a config asks for, and tensors that differ from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .families import FAMILIES
from .layer_kinds import Unsupported
from .multipliers import why_no_multipliers
from .ropes import rope_parameters
from .state_space import why_no_state_space

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from .decoder import DecoderSpec

# Under transformers' names.
ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
    "xielu": "xielu",
}
# Those whose frequencies do not depend on the length of a sequence, unless it is beyond ``context_limit``.
_ROPE_TYPES = {"default", "linear", "llama3", "yarn", "longrope", "dynamic"}
_SUPPORTED = {  # values of settings, in families that have them
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "conv_bias": False,
    "do_layer_norm_before": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
_NEVER_ZERO = (
    "attention_multiplier",
    "clip_qkv",
    "attention_in_multiplier",
    "key_multiplier",
    "lm_head_multiplier",
    "logits_scaling",
    "logit_scale",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)


def activation_of(config: PretrainedConfig) -> str:
    """transformers' name of the activation of MLPs."""
    setting = FAMILIES[config.model_type].activation
    return str(getattr(config, setting, setting))


def check_config(config: PretrainedConfig) -> None:
    """
    Raises:
        Unsupported: the family is unknown here, or its config asks for what ``DecoderSpec`` cannot express.
    """
    if (family := FAMILIES.get(config.model_type)) is None:
        raise Unsupported(f"{config.model_type} models are not supported")
    if (activation := activation_of(config)) not in ACTIVATIONS:
        raise Unsupported(f"its activation is {activation}")
    convolved = getattr(config, "mamba_hidden_act", activation)
    if (family.has_delta_rules or family.state_spaces) and convolved != "silu":
        raise Unsupported(f"its convolutions' activation is {convolved}")
    why = why_no_state_space(config, family.state_spaces) if family.state_spaces else None
    if why or (why := why_no_multipliers(config)):
        raise Unsupported(why)
    if getattr(config, "use_bidirectional_attention", None):
        raise Unsupported("its attention is not causal")
    for name, supported in _SUPPORTED.items():
        if (value := getattr(config, name, supported)) != supported:
            raise Unsupported(f"its {name} is {value}")
    for name in _NEVER_ZERO:
        if getattr(config, name, None) == 0:
            raise Unsupported(f"its {name} is 0")
    for rope in rope_parameters(config).values():
        if rope.get("rope_type") not in _ROPE_TYPES:
            raise Unsupported(f"its rotary positions are of type {rope.get('rope_type')}")
        if rope.get("partial_rotary_factor", 1.0) != 1.0 and not family.turns_in_part:
            raise Unsupported("its rotary positions turn only some of its channels")


def check_sizes(spec: DecoderSpec) -> None:
    """
    Raises:
        Unsupported: numbers of heads or channels contradict each other, so that no kernel could keep within them.
    """
    if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
        raise Unsupported(f"its {spec.num_heads} heads share {spec.num_kv_heads} heads of keys and values")
    channels = spec.latent.rotary_dim if spec.latent else spec.head_dim
    turns = any(rope is not None for rope in spec.ropes)
    if turns and (spec.rotary_dim % 2 or not 0 <= spec.rotary_dim <= channels):
        raise Unsupported(f"its positions turn {spec.rotary_dim} of the {channels} channels of a head")
    if spec.query_growth_span < 1:
        raise Unsupported(f"its queries grow every {spec.query_growth_span} positions")


def check_tensors(spec: DecoderSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """
    Raises:
        Unsupported: a checkpoint with tensors of these shapes is not what its config says.
    """
    expected = spec.tensors()
    # Old checkpoints store rotary frequencies, which are computed here, and some store a tied head twice.
    ignored = {name for name in shapes if name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"}
    family = FAMILIES[spec.model_type]
    prediction = (
        rf"{family.ignored}|model\.layers\.{spec.num_layers}\." if family.has_prediction_layer else family.ignored
    )
    ignored |= {name for name in shapes if re.match(prediction, name)}
    differing = sorted(
        (expected.keys() - shapes.keys())
        | (shapes.keys() - expected.keys() - ignored)
        | {name for name in expected.keys() & shapes.keys() if expected[name] != tuple(shapes[name])}
    )
    if differing:
        raise Unsupported(f"{len(differing)} of its tensors differ from its config, {differing[0]} first")
