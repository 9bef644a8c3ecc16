"""How a checkpoint makes embeddings, if it does.

Only files of JSON are read. They are those of sentence-transformers: ``modules.json`` lists what is applied one after
the other, the folder of the pooling has a config, and a third file has instructions for texts. A checkpoint without
them says nothing about its pooling; most that are made of decoders take the last token, which alone has seen all
others, and scale its state to length 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ..scheduling.pooling import LAST_STATE, MEAN, POOLINGS, WEIGHTED_MEAN, Pooling
from .checkpoint.hub import first_line

_MODULES = "modules.json"
_PROMPTS = "config_sentence_transformers.json"
_MODE, _SWITCH = "pooling_mode", "pooling_mode_"  # the mode, or the beginning of the names of switches, one for each
_NAMES_OF_SWITCHES = {f"{mode}_tokens": mode for mode in (MEAN, WEIGHTED_MEAN)}  # of others they are the same
_TAKES_PROMPTS = "include_prompt"  # if false, the instruction before a text is left out of the pooling
_WITH_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


class _Unknown(Exception):
    """The embeddings of this checkpoint cannot be made; the message says why."""


class Embeddings(NamedTuple):
    """How a checkpoint makes embeddings."""

    pooling: Pooling = LAST_STATE
    prompts: dict[str, str] = {}  # instructions that are put in front of a text, by name
    default_prompt: str = ""  # the name of one of them, for texts that name none; empty: these have none
    why_not: str = ""  # why they cannot be made; empty if they can


def describe_embeddings(folder: Path) -> Embeddings:
    """How this checkpoint's embeddings are made, or why they cannot be."""
    try:
        config = _read(folder / "config.json")
        for each in (config, config.get("text_config") or {}):
            if each.get("use_bidirectional_attention") or each.get("is_causal") is False:
                raise _Unknown("its attention is not causal")
        return Embeddings(_pooling(folder), *_prompts(folder))
    except _Unknown as error:
        return Embeddings(why_not=str(error))
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        return Embeddings(why_not=f"its description for sentence-transformers is damaged: {first_line(error)}")


def _prompts(folder: Path) -> tuple[dict[str, str], str]:
    if not (folder / _PROMPTS).is_file():
        return {}, ""
    config = _read(folder / _PROMPTS)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name") or ""
    if not all(isinstance(text, str) for text in prompts.values()):
        raise TypeError(f"in {_PROMPTS}, a prompt is no text")
    if default and default not in prompts:
        raise KeyError(f"in {_PROMPTS}, there is no prompt {default!r}")
    return dict(prompts), default


def _pooling(folder: Path) -> Pooling:
    if not (folder / _MODULES).is_file():
        return LAST_STATE
    modules = _read(folder / _MODULES)
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise _Unknown(f"{_MODULES} applies {', '.join(kinds)}, known are Transformer, Pooling and Normalize")
    settings = _read(folder / modules[1]["path"] / "config.json")
    switches = [
        name.removeprefix(_SWITCH) for name, value in settings.items() if name.startswith(_SWITCH) and value is True
    ]
    modes = [str(settings[_MODE])] if _MODE in settings else switches
    modes = [_NAMES_OF_SWITCHES.get(mode, mode) for mode in modes]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise _Unknown(f"its pooling is {', '.join(modes)}, known is one of {', '.join(POOLINGS)}")
    pooling = Pooling(modes[0], normalizes=kinds[2:] == ["Normalize"])
    if pooling.takes_all and settings.get(_TAKES_PROMPTS) is False:
        raise _Unknown(f"its pooling leaves out instructions ({_TAKES_PROMPTS} is false)")
    return pooling


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
