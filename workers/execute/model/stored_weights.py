"""In what form a checkpoint has its weights: as plain numbers, in four bits, or in FP8."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....protocol.errors import ConfigError
from .decoder_spec import Unsupported
from .four_bits import QuantisedCheckpoint, find_layout
from .fp8_weights import Block, Fp8Checkpoint, check_types, fp8_blocks
from .native_weights import Checkpoint
from .stacked_experts import StackedExperts

# Families that store all experts of a layer as one tensor, inputs by outputs or the other way round.
_STACKED = {"gpt_oss"}
_STACKED_BY_OUTPUTS = {"qwen3_5_moe", "qwen3_5_moe_text"}
_NAMES = ("quantization_config", "compression_config")
_MODELOPT_FILE = "hf_quant_config.json"  # where modelopt says it, if not in the config


def read_settings(folder: Path) -> dict[str, Any] | None:
    """What a checkpoint directory says about the quantisation of its weights; None where it says nothing.

    Raises:
        ConfigError: what it says is damaged.
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
    """The tensors of a checkpoint directory, whose config.json is known to be there.

    Raises:
        Unsupported: its weights are quantised in a way that is not known here.
        ConfigError: something of its quantised weights is missing or damaged.
    """
    settings = read_settings(folder)
    family = json.loads((folder / "config.json").read_text()).get("model_type")
    is_stacked = family in _STACKED
    if settings is None or (is_stacked and settings.get("quant_method") == "mxfp4"):
        by_outputs = family in _STACKED_BY_OUTPUTS
        plain = StackedExperts(folder, by_outputs=by_outputs) if is_stacked or by_outputs else Checkpoint(folder)
        check_types(folder, plain.types())
        return plain
    if (blocks := _blocks(folder, settings)) is not None:
        return Fp8Checkpoint(folder, blocks)
    with _reading(folder):
        layout, group_size = find_layout(settings)
    return QuantisedCheckpoint(folder, layout, group_size)


def open_for_modules(folder: Path) -> Fp8Checkpoint | None:
    """What transformers' modules are given instead of a checkpoint directory with weights in FP8: all of its tensors,
    by their names in its files. None where transformers has to read it by itself.

    Its own reader of FP8 needs packages and devices for some kinds, takes others for plain numbers, and blocks at an
    edge for smaller ones.

    Raises:
        ConfigError: the weights are of a kind that neither it nor we know, or something of them is missing or damaged.
    """
    settings = read_settings(folder)
    try:
        if settings is None:
            check_types(folder, Checkpoint(folder, _as_stored).types())
            return None
        if (blocks := _blocks(folder, settings)) is not None:
            tensors = Fp8Checkpoint(folder, blocks, _as_stored)
            tensors.check_scales()  # before transformers reads any, which would not say what was wrong
            return tensors
    except Unsupported as error:
        raise ConfigError(str(error), param="model") from error
    if not _is_known_to_transformers(settings):
        raise ConfigError(f"its weights are quantised by {kind_of(settings)}", param="model")
    return None


def kind_of(settings: Mapping[str, Any]) -> str:
    """What a quantization_config calls itself."""
    names = ("quant_method", "quant_algo", "format")
    return " ".join(str(settings[name]) for name in names if settings.get(name)) or "something without a name"


def _is_known_to_transformers(settings: dict[str, Any]) -> bool:
    """Others it would take for plain numbers."""
    from transformers.quantizers.auto import AutoHfQuantizer  # here: a proven checkpoint does without

    try:
        return bool(AutoHfQuantizer.supports_quant_method(settings))  # type: ignore[no-untyped-call]
    except ValueError:  # no method is named
        return False


def _blocks(folder: Path, settings: Mapping[str, Any]) -> list[Block] | None:
    with _reading(folder):
        return fp8_blocks(settings)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Whatever a quantization_config lacks, or has of another type, is its damage."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        file = folder / "config.json"
        raise ConfigError(f"quantization_config in {file} is damaged: {error!r}", param="model") from error


def _as_stored(names: Iterable[str]) -> Mapping[str, str]:
    return {name: name for name in names}
