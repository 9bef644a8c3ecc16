"""The config of a model in a GGUF file: transformers' own reading of its settings, and what that leaves out."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ......protocol.errors import ConfigError
from ..hub import first_line
from .architectures import FAMILIES, family_of
from .completions import refuse
from .file import GgufFile
from .table_settings import read_by_table, settings_of

logger = logging.getLogger(__name__)

_NUM_GUESSING = "nextn_predict_layers"
_FREQUENCIES, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
OF_CONFIG = {_FREQUENCIES, _LONG, _SHORT}  # tensors that are part of it
# Names of architectures in GGUF files and in transformers, where they differ.
_RENAMED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
# Settings that transformers leaves at the defaults of a config class, which are those of one size of the family.
_ATTRIBUTES = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_WITHOUT_WINDOWS = ("llama", "phi3")  # unless it is stated; 0 for Phi-4
_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
_EPS = "attention.layer_norm_rms_epsilon"
# Without them a config class would take its own.
_NEEDED = {"attention.head_count", "block_count", "context_length", "embedding_length"}
# Settings that transformers reads by a function, which does not tell which they are.
_READ_BY_FUNCTIONS: dict[str, set[str]] = {
    "lfm2": {"shortconv.l_cache"},
    "qwen35": {
        "attention.key_length", "full_attention_interval", "rope.dimension_count", "rope.dimension_sections",
        "ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank",
    },
}  # fmt: skip
_RECURRENT = "attention.recurrent_layers"
_READ_BY_FUNCTIONS["qwen35moe"] = _READ_BY_FUNCTIONS["qwen35"] | {
    "expert_count", "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_used_count",
}  # fmt: skip
_SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
_BASE_OF_WINDOWS, _PATTERN = "rope.freq_base_swa", "attention.sliding_window_pattern"
_SIZES_OF_WINDOWS = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
_STRETCH = "rope.scaling.attn_factor"
_YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
_UNDERSTOOD = {  # in all architectures
    _BASE_OF_WINDOWS,
    _PATTERN,
    _RECURRENT,
    *_SIZES_OF_WINDOWS,
    _NUM_GUESSING,
    *_NEEDED,
    *_SCALING,
    *_YARN,
    "attention.value_length",
    "rope.dimension_count",
}
_HARMLESS = {"attention.causal", "pooling_type", "rope.scaling.finetuned", "tensor_data_layout"}
_MATTERS = re.compile(r"scale|scaling|softcap|window|expert|rope|clamp|alibi|norm|parallel|shared|swa|layers")
# Layers of the sizes whose scores have another divisor than the root of the head size, which no setting tells;
# llama.cpp knows them by the same number.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_settings(file: GgufFile, folder: Path, name: str) -> PretrainedConfig:
    """Return the config of ``file``, which is in ``folder`` under this name.

    Raises:
        ConfigError: transformers cannot read it, or a setting has a meaning that would be lost.
    """
    _check_keys(file)
    try:
        family = family_of(file)
        config: Any = _read_by_transformers(file, folder, name) if family is None else read_by_table(file, family)
    except ConfigError:
        raise
    except Exception as error:  # missing settings are a KeyError, wrong ones whatever their config class raises
        raise ConfigError(f"cannot use the settings in {file.path}: {first_line(error)}", param="model") from error
    for attribute, key in _TOKENS.items():  # not those of the config class, which are one checkpoint's too
        setattr(config, attribute, file.value(f"tokenizer.ggml.{key}"))
    _scale_rope(file, config)
    _check_rotary_size(file, config)
    _read_windows(file, config)
    for made_up in ("_model_name_or_path", "_name_or_path"):  # transformers has tables of names with exceptions
        vars(config).pop(made_up, None)
    ready: PretrainedConfig = config
    return ready


def _read_by_transformers(file: GgufFile, folder: Path, name: str) -> Any:
    config: Any = AutoConfig.from_pretrained(folder, gguf_file=name, trust_remote_code=False, local_files_only=True)
    for key, attribute in _ATTRIBUTES.items():
        value = file.of_model(key)
        if value is not None and key not in _known_to_transformers(file) and hasattr(config, attribute):
            setattr(config, attribute, value)
    if file.architecture in _WITHOUT_WINDOWS and not file.of_model("attention.sliding_window"):
        config.sliding_window = None
    if "output.weight" in file.tensors:  # transformers looks for it in the first part only
        config.tie_word_embeddings = False
    if file.of_model("block_count") == _LAYERS_OF_27B.get(file.architecture):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    return config


def layer_of(name: str) -> int | None:
    """The layer of a tensor; None if it is of no layer."""
    prefix, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if prefix == "blk" and number.isdecimal() else None


def unused_layers(file: GgufFile) -> range:
    """Layers that guess further tokens. They are the last, and belong to no model of transformers."""
    count = file.of_model("block_count")
    return range(count - (file.of_model(_NUM_GUESSING) or 0), count)


def _known_to_transformers(file: GgufFile) -> set[str]:
    if file.architecture in _READ_BY_FUNCTIONS:
        return _READ_BY_FUNCTIONS[file.architecture]
    mapping: Any = GGUF_TO_TRANSFORMERS_MAPPING["config"]
    return {key for key, name in mapping[_RENAMED.get(file.architecture, file.architecture)].items() if name}


def _understood(file: GgufFile) -> set[str]:
    """The settings that decide what the config becomes, or are compared with it."""
    family = family_of(file)
    if family is not None:
        return _UNDERSTOOD | settings_of(family)
    of_phi = {_STRETCH} if _LONG in file.tensors else set()
    return _UNDERSTOOD | {_EPS, "rope.freq_base", *_ATTRIBUTES} | of_phi | _known_to_transformers(file)


def _needed(file: GgufFile) -> set[str]:
    family = family_of(file)
    needed = FAMILIES[family].needed if family is not None else frozenset[str]()
    return _NEEDED | (needed if "attention.layer_norm_epsilon" in needed else {*needed, _EPS})


def _check_keys(file: GgufFile) -> None:
    """
    Raises:
        ConfigError: a setting is missing or would be ignored, so that the model would be another.
    """
    for key in sorted(_needed(file)):
        if key not in file.keys:
            raise ConfigError(f"{file.path} does not state {file.architecture}.{key}", param="model")
    stated = file.of_model("block_count")
    if stated != (num_layers := len({layer_of(name) for name in file.tensors} - {None})):
        text = f"{file.path} states {file.architecture}.block_count = {stated!r:.50} and has {num_layers} layers"
        raise ConfigError(text, param="model")
    num_guessing = file.of_model(_NUM_GUESSING) or 0
    if not 0 <= num_guessing < num_layers:
        text = f"{file.path} states {file.architecture}.{_NUM_GUESSING} = {num_guessing!r:.50} of {num_layers} layers"
        raise ConfigError(text, param="model")
    known = _understood(file) | _HARMLESS
    for key in file.keys:
        if key in known:
            continue
        if _MATTERS.search(key) and file.of_model(key) not in (None, 0, False):
            text = f"{file.path} states {file.architecture}.{key} = {file.of_model(key)!r:.50}, which is not supported"
            raise ConfigError(text, param="model")
        logger.info("the setting %s.%s of %s is not used", file.architecture, key, file.path)


def _scale_rope(file: GgufFile, config: Any) -> None:
    """Add to the config how frequencies were changed for long contexts, which transformers does not read.

    Raises:
        ConfigError: they were changed in a way that is not supported.
    """
    kind, factor, original = (file.of_model(key) for key in _SCALING)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # layers with a window are not scaled
    if _FREQUENCIES in file.tensors:
        _find_llama3(file, config)
    elif _LONG in file.tensors:
        _read_longrope(file, config)
    elif kind == "linear" and rope:
        rope.update(rope_type="linear", factor=float(factor))
    elif kind == "yarn" and factor and original and rope:
        rope.update(rope_type="yarn", factor=float(factor), original_max_position_embeddings=int(original))
        rope.update({name: float(file.of_model(key)) for key, name in _YARN.items() if file.of_model(key) is not None})
    elif kind not in (None, "none"):
        raise ConfigError(f"{file.path} scales its frequencies by {kind!r}, known are: linear, yarn", param="model")


def _find_llama3(file: GgufFile, config: Any) -> None:
    """A file has the result of Llama 3.1's scaling only, a divisor for each frequency; a config has its parameters,
    of which one differs among the models.
    """
    stored = _numbers(file, _FREQUENCIES)
    plain = config.rope_parameters
    scaled = {**plain, **_LLAMA3, "rope_type": "llama3", "factor": float(np.round(stored.max(), 3))}
    theta, head_dim = float(plain["rope_theta"]), int(config.head_dim)
    unscaled = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    config.rope_parameters = scaled
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    divisors = (unscaled / frequencies.double()).numpy()
    if stored.shape != divisors.shape or not np.allclose(stored, divisors, rtol=1e-3):
        text = f"{_FREQUENCIES} in {file.path} is not what Llama 3.1 to 3.3 have, which alone is supported"
        raise ConfigError(text, param="model")


def _read_longrope(file: GgufFile, config: Any) -> None:
    """Of Phi-3 and later: factors for each frequency, for short contexts and for those beyond the original ones.

    Raises:
        ConfigError: scores are stretched by another factor than the one that follows from the lengths of contexts.
    """
    length = file.of_model("context_length")
    original = file.of_model("rope.scaling.original_context_length") or length
    config.original_max_position_embeddings = original
    config.rope_parameters |= {
        "rope_type": "longrope",
        "long_factor": _numbers(file, _LONG).tolist(),
        "short_factor": _numbers(file, _SHORT).tolist(),
        "original_max_position_embeddings": original,
    }
    stated = file.of_model(_STRETCH)
    follows = math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original else 1.0
    if not math.isclose(stated or follows, follows, rel_tol=1e-4):
        raise refuse(file, _STRETCH)


def _numbers(file: GgufFile, name: str) -> npt.NDArray[np.float32]:
    tensor = file.tensors[name]
    numbers: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type).ravel()
    return numbers


def _check_rotary_size(file: GgufFile, config: Any) -> None:
    family = family_of(file)
    read = _READ_BY_FUNCTIONS.get(file.architecture, set()) if family is None else settings_of(family)
    if "rope.dimension_count" in read:
        return
    size, head_dim = file.of_model("rope.dimension_count"), getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    if file.architecture == "phi3" and size is not None:
        config.rope_parameters["partial_rotary_factor"] = size / head_dim
    elif size not in (None, head_dim):
        text = f"{file.path} rotates {size} of the {head_dim} channels of a head, which is not supported"
        raise ConfigError(text, param="model")


def _of_layers(file: GgufFile, key: str) -> Any:
    """A setting that may be a list, of the layers that are used."""
    stated = file.of_model(key)
    return stated[: unused_layers(file).start] if isinstance(stated, list) else stated


def _read_windows(file: GgufFile, config: Any) -> None:
    """Read what is stated of layers with a window only, which is the same as of the others except for frequencies.

    Raises:
        ConfigError: it is not.
    """
    base, pattern = file.of_model(_BASE_OF_WINDOWS), _of_layers(file, _PATTERN)
    if base is not None and "sliding_attention" in config.rope_parameters:
        config.rope_parameters["sliding_attention"]["rope_theta"] = base
        base = None
    kinds = getattr(config, "layer_types", None) or []
    if isinstance(pattern, int):  # one in so many has none
        pattern = [(layer + 1) % pattern != 0 for layer in range(len(kinds))] if pattern else None
    head_dim = getattr(config, "head_dim", None)
    for key, value, known in (
        (_BASE_OF_WINDOWS, base, None),
        (_PATTERN, pattern, [kind == "sliding_attention" for kind in kinds]),
        (_RECURRENT, _of_layers(file, _RECURRENT), [kind == "linear_attention" for kind in kinds]),
        *((key, file.of_model(key), head_dim) for key in _SIZES_OF_WINDOWS),
    ):
        if value not in (None, known):
            text = f"{file.path} states {file.architecture}.{key} = {file.of_model(key)!r:.50}, which is not supported"
            raise ConfigError(text, param="model")
