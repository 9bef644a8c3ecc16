"""Whether a checkpoint makes embeddings, and as it was trained to: the last token's state, scaled to length 1.

Only files of JSON are read. They are those of sentence-transformers: ``modules.json`` lists what is applied one after
the other, and the folder of the pooling has a config. A checkpoint without them says nothing about its pooling; those
made of decoders take the last token, which alone has seen all others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .checkpoint.hub import first_line

_MODULES = "modules.json"
_MODE = "pooling_mode"  # the mode itself, or the beginning of the names of switches, one for each mode
_LAST_TOKEN = "lasttoken"
_WITH_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def why_no_embeddings(folder: Path) -> str:
    """Why this checkpoint's embeddings cannot be made; empty if they can."""
    try:
        config = _read(folder / "config.json")
        for each in (config, config.get("text_config") or {}):
            if each.get("use_bidirectional_attention") or each.get("is_causal") is False:
                return "its attention is not causal"
        return _why_not_pooled(folder)
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        return f"its description for sentence-transformers is damaged: {first_line(error)}"


def _why_not_pooled(folder: Path) -> str:
    if not (folder / _MODULES).is_file():
        return ""
    modules = _read(folder / _MODULES)
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        return f"{_MODULES} applies {', '.join(kinds)}, known are Transformer, Pooling and Normalize"
    settings = _read(folder / modules[1]["path"] / "config.json")
    modes = [name.removeprefix(f"{_MODE}_") for name, value in settings.items() if name != _MODE and value is True]
    modes = [str(settings[_MODE])] if _MODE in settings else [mode for mode in modes if f"{_MODE}_{mode}" in settings]
    return "" if modes == [_LAST_TOKEN] else f"its pooling is {', '.join(modes)}, known is {_LAST_TOKEN}"


def may_lack_head(folder: Path) -> bool:
    """Whether this checkpoint is whole without a head: it is described as one for embeddings, or as a base model."""
    if (folder / _MODULES).is_file():
        return True
    names = _read(folder / "config.json").get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    return bool(names) and not any(name.endswith(_WITH_HEADS) for name in names)


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))
