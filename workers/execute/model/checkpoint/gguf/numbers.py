"""Weights that are a single number per layer: files have them among their settings."""

from __future__ import annotations

from transformers import PreTrainedModel

from ......protocol.errors import ConfigError
from .architectures import FAMILIES, family_of
from .file import GgufFile
from .layouts import LAYER


def numbers_of(file: GgufFile, model: PreTrainedModel) -> dict[str, float]:
    """The weights of the model that the settings of the file have, by name.

    Raises:
        ConfigError: a setting has another number of layers.
    """
    if (family := family_of(file)) is None:
        return {}
    found: dict[str, float] = {}
    for end, setting in FAMILIES[family].numbers.items():
        if (stated := file.value(setting)) is None:
            continue
        weights = [name for name in model.state_dict() if name.endswith(end)]
        numbers = stated if isinstance(stated, list) else [stated] * len(weights)  # as llama.cpp reads it
        if len(numbers) != len(weights):
            text = f"{file.path} states {setting} for {len(numbers)} layers and has {len(weights)}"
            raise ConfigError(text, param="model")
        found |= {name: float(numbers[int(LAYER.findall(name)[0])]) for name in weights}
    return found
