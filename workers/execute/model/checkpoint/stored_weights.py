"""How a checkpoint stores its weights: as plain numbers, in four bits, or in FP8."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .....protocol.errors import ConfigError
from ..spec.decoder import Unsupported
from ..spec.families import FAMILIES
from .four_bit_layouts import find_layout
from .four_bits import QuantisedCheckpoint
from .fp8_weights import Block, Fp8Checkpoint, check_types, fp8_blocks
from .mapped import Checkpoint, Names
from .stacked_experts import StackedExperts
from .text_part import text_names

# Families that store all experts of a layer in one tensor, as inputs by outputs or as outputs by inputs.
_STACKED = {"gpt_oss"}
_STACKED_BY_OUTPUTS = {"granitemoe", "granitemoehybrid", "qwen3_5_moe", "qwen3_5_moe_text"}
_NAMES = ("quantization_config", "compression_config")
_MODELOPT_FILE = "hf_quant_config.json"  # where modelopt stores its settings, if not in config.json


def read_settings(folder: Path) -> dict[str, Any] | None:
    """Read the quantisation settings of a checkpoint directory; None if it has none.

    Raises:
        ConfigError: the settings are damaged.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text())
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for name in _NAMES:
            if (settings := part.get(name)) is not None:
                if not isinstance(settings, dict):
                    raise ConfigError(f"{name} in {file} is damaged: it is {settings!r:.50}", param="model")
                return settings
    if not (folder / _MODELOPT_FILE).is_file():
        return None
    try:
        return {"quant_method": "modelopt", **json.loads((folder / _MODELOPT_FILE).read_text())["quantization"]}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / _MODELOPT_FILE} is damaged: {error!r}", param="model") from error


def open_tensors(folder: Path) -> Checkpoint:
    """Open the tensors of a checkpoint directory, whose config.json must exist.

    Raises:
        Unsupported: its weights are quantised in an unknown way.
        ConfigError: part of its quantised weights is missing or damaged.
    """
    settings = read_settings(folder)
    family = family_of(folder)
    is_stacked = family in _STACKED
    if settings is None or (is_stacked and settings.get("quant_method") == "mxfp4"):
        by_outputs = family in _STACKED_BY_OUTPUTS
        is_stacked |= by_outputs
        plain = StackedExperts(folder, by_outputs=by_outputs) if is_stacked else Checkpoint(folder, _names_of(family))
        check_types(folder, plain.types())
        return plain
    if (blocks := _blocks(folder, settings)) is not None:
        return Fp8Checkpoint(folder, blocks, _names_of(family))
    with _reading(folder):
        stored = find_layout(settings)
    if family in FAMILIES and FAMILIES[family].is_transposed:
        raise Unsupported(f"its weights have four bits, in which the kernels do not support the matrices of {family}")
    return QuantisedCheckpoint(folder, stored, _names_of(family))


def open_for_modules(folder: Path) -> Fp8Checkpoint | None:
    """Open a checkpoint directory with FP8 weights for transformers' modules: all its tensors, by their names in its
    files. None if transformers should read the directory itself.

    transformers' own FP8 reader needs extra packages and devices for some kinds of FP8, mistakes others for plain
    numbers, and treats blocks at an edge as smaller ones.

    Raises:
        ConfigError: the kind of weights is unknown here and to transformers, or part of them is missing or damaged.
    """
    settings = read_settings(folder)
    try:
        if settings is None:
            check_types(folder, Checkpoint(folder, _as_stored).types())
            return None
        if (blocks := _blocks(folder, settings)) is not None:
            tensors = Fp8Checkpoint(folder, blocks, _as_stored)
            tensors.check_scales()  # before transformers reads any, as it would not report what is wrong
            return tensors
    except Unsupported as error:
        raise ConfigError(str(error), param="model") from error
    if not _is_known_to_transformers(settings):
        raise ConfigError(f"its weights are quantised by {kind_of(settings)}", param="model")
    return None


def kind_of(settings: Mapping[str, Any]) -> str:
    """The name of the quantisation method in a quantization_config."""
    names = ("quant_method", "quant_algo", "format")
    return " ".join(str(settings[name]) for name in names if settings.get(name)) or "an unnamed method"


def _is_known_to_transformers(settings: dict[str, Any]) -> bool:
    """Whether transformers knows the method; it would take the weights for plain numbers otherwise."""
    from transformers.quantizers.auto import AutoHfQuantizer  # here: a proven checkpoint starts without it

    try:
        return bool(AutoHfQuantizer.supports_quant_method(settings))
    except ValueError:  # no method is named
        return False


def _blocks(folder: Path, settings: Mapping[str, Any]) -> list[Block] | None:
    with _reading(folder):
        return fp8_blocks(settings)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Report missing values and wrong types in a quantization_config as damage."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        file = folder / "config.json"
        raise ConfigError(f"quantization_config in {file} is damaged: {error!r}", param="model") from error


def _names_of(family: str | None) -> Names:
    """The names of the tensors of a family: those that transformers uses, which need not be the published ones."""
    return lambda stored: {usual_name(family, name): as_stored for name, as_stored in text_names(stored).items()}


def usual_name(family: str | None, name: str) -> str:
    """The name that transformers uses for a tensor or module of this published name."""
    for pattern, instead in FAMILIES[family].renamed if family in FAMILIES else ():
        name = re.sub(pattern, instead, name)
    return name


def family_of(folder: Path) -> str | None:
    """The family that config.json names, if it does."""
    try:
        family = json.loads((folder / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError):  # whoever needs the config will say so
        return None
    return family if isinstance(family, str) else None


def _as_stored(names: Iterable[str]) -> Mapping[str, str]:
    return {name: name for name in names}
