"""The config of a model of one of the architectures that a table of ours describes."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from ......protocol.errors import ConfigError
from .architecture import Architecture, Attributes
from .architectures import FAMILIES
from .completions import refuse
from .file import GgufFile

_HEAD_DIM = "attention.key_length"
_ROTARY_SIZE = "rope.dimension_count"


def read_by_table(file: GgufFile, family: str) -> PretrainedConfig:
    """Return the config of a model of one of transformers' families.

    Raises:
        ConfigError: a setting is missing, or has a value that is not supported, or transformers lacks the family.
    """
    if family not in CONFIG_MAPPING:
        text = f"{file.path}: transformers {version('transformers')} does not know {family!r}, newer ones do"
        raise ConfigError(text, param="model")
    architecture = FAMILIES[family]
    values: Attributes = {**architecture.fixed, "tie_word_embeddings": "output.weight" not in file.tensors}
    for key, attribute in architecture.attributes().items():
        if (stated := file.of_model(key)) is not None:
            values[attribute] = _single(file, key) if key not in architecture.reads else stated
    values["num_hidden_layers"] -= file.of_model("nextn_predict_layers") or 0
    values["vocab_size"] = int(file.tensors["token_embd.weight"].shape[-1])
    ends = {name.split(".", 2)[-1] for name in file.tensors}
    values |= {attribute: end in ends for attribute, end in architecture.flags.items()}
    if architecture.turns:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": file.of_model("rope.freq_base") or 10000.0}
    _add_head_sizes(file, architecture, values, CONFIG_MAPPING[family])
    if architecture.complete is not None:
        architecture.complete(file, values)
    config: PretrainedConfig = AutoConfig.for_model(family, **values)
    return config


def settings_of(family: str) -> set[str]:
    """The settings that decide what the config becomes."""
    architecture = FAMILIES[family]
    read = {*architecture.attributes(), *architecture.reads, _HEAD_DIM, "rope.freq_base"}
    return read | ({_ROTARY_SIZE} if architecture.turns_in_part else set())


def _single(file: GgufFile, key: str) -> Any:
    """A setting that the family has once, though files may state it for each layer.

    Raises:
        ConfigError: layers differ.
    """
    stated = file.of_model(key)
    if not isinstance(stated, list):
        return stated
    if not stated or any(value != stated[0] for value in stated):
        raise refuse(file, key)
    return stated[0]


def _add_head_sizes(
    file: GgufFile, architecture: Architecture, values: Attributes, config_class: type[PretrainedConfig]
) -> None:
    usual = values["hidden_size"] // values["num_attention_heads"]
    head_dim = int(file.of_model(_HEAD_DIM) or usual)
    if _HEAD_DIM not in architecture.reads and (head_dim != usual or "head_dim" in vars(config_class())):
        values["head_dim"] = head_dim
    if architecture.turns_in_part:  # always given, as config classes would take parts of their own
        values["rope_parameters"]["partial_rotary_factor"] = (file.of_model(_ROTARY_SIZE) or head_dim) / head_dim
