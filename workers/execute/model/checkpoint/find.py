"""Finding a checkpoint and reading its config, with one clear error for each way this can fail."""

from __future__ import annotations

import json
import logging
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from .....protocol.config import DEMO_CHECKPOINT, DEMO_MODEL
from .....protocol.errors import ConfigError, InvalidRequest
from .....protocol.home import from_home, mode_of
from .....protocol.sampling import SamplingParams
from .gguf.cache import SUFFIX, find_unpacked, is_gguf
from .hub import fetch, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_GENERATION = "generation_config.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

_NUM_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")  # settings, of which a family has one
_MOST_LAYERS = 10_000

# Layers that remember the past in pages of keys and values, in a per-sequence state, in both, or not at all. Any other
# type applies a mask of its own that a paged kernel never sees, so its results would be silently wrong.
_PAGED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_RECURRENT_LAYER_TYPES = {"linear_attention", "conv", "hybrid"}
NO_MIXING = {"mlp", "moe"}  # no token sees another


def find_checkpoint(
    model: str | Path, *, dtype: str = "auto", progress: Callable[[int, int], None] = lambda done, total: None
) -> Path:
    """Return the local directory of a checkpoint: ``model`` itself, the demo's, the local copy of the hub's, or that of
    a GGUF file, whose weights are of type ``dtype``.

    ``progress`` is called with (done, total) tensors if a GGUF file is unpacked.

    Raises:
        ConfigError: there is no such directory or file, it cannot be used, or the hub does not provide it.
    """
    if model == DEMO_MODEL:
        return DEMO_CHECKPOINT
    folder = from_home(model, param="model")
    if _is_model_folder(folder):
        return folder
    if is_gguf(model):
        return find_unpacked(folder, dtype=dtype, progress=progress)
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        hint = "; an id on the hub has the form OWNER/NAME" if "://" in str(model) else ""
        raise ConfigError(f"model directory {model} does not exist{hint}", param="model")
    return fetch(model)


def _is_model_folder(path: Path) -> bool:
    """Whether it is a folder, which then is a model.

    Raises:
        ConfigError: it is not one, in which case the error names the model that lies in it, if one does; or its files
            cannot be read.
    """
    try:
        if stat.S_ISREG(mode_of(path / "config.json") or 0):
            return True
        if not stat.S_ISDIR(mode_of(path) or 0):
            return False
    except OSError as error:  # as of a folder that is somebody else's
        raise ConfigError(f"model {path} cannot be read: {error.strerror}", param="model") from error
    configs = (*path.glob("*/config.json"), *path.glob("snapshots/*/config.json"))  # the latter: the hub's cache
    found = sorted([*path.glob(f"*{SUFFIX}"), *(file.parent for file in configs)])
    hint = f"; name what is in it, such as {found[0]}" if found else ""
    raise ConfigError(f"{path} is not a model: it has no config.json{hint}", param="model")


@contextmanager
def attributed_to_draft() -> Iterator[None]:
    """Attribute config errors in this block to the draft model rather than to the target model."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"the draft model: {error}", param="draft_model") from error


def read_config(folder: Path) -> PretrainedConfig:
    """Read the model's config. Code that comes with a checkpoint is never run.

    Raises:
        ConfigError: the config is missing or damaged, or transformers does not know the architecture.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json", param="model")
    from transformers import AutoConfig

    _check_num_layers(folder / "config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # every config class validates in its own way
        raise ConfigError(f"cannot use {folder / 'config.json'}: {first_line(error)}", param="model") from error
    return config


def _check_num_layers(file: Path) -> None:
    """Config classes make lists with an item for each layer, and transformers a module, however many there are.

    Raises:
        ConfigError: there are more than any model has.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # transformers says so
        return
    for part in (config, config.get("text_config") if isinstance(config, dict) else None):
        for name in _NUM_LAYERS:
            count = part.get(name) if isinstance(part, dict) else None
            if isinstance(count, (int, float)) and count > _MOST_LAYERS:
                raise ConfigError(f"{name} in {file} is {count}, the limit is {_MOST_LAYERS}", param="model")


def check_weights(folder: Path) -> None:
    """Read the header of every weight file, so that a damaged file is reported before anything is loaded.

    Raises:
        ConfigError: a file is missing, truncated or not safetensors.
    """
    for file in weight_files(folder):
        if not file.is_file():
            raise ConfigError(f"{file} is missing, though {_WEIGHTS_INDEX} names it", param="model")
        try:
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is damaged: {first_line(error)}", param="model") from error


def read_end_tokens(folder: Path) -> list[int] | None:
    """Return the ids of the tokens that end an answer, as generation_config.json states them; None if there is no such
    file. transformers ignores a damaged one, and answers would not end.

    Raises:
        ConfigError: it is damaged.
    """
    if (settings := _read_generation_config(folder)) is None:
        return None
    stated = settings.get("eos_token_id")
    ends = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(type(token_id) is int for token_id in ends):
        text = f"eos_token_id is {stated!r:.80}, it must be a token id, a list of them, or null"
        raise ConfigError(f"{folder / _GENERATION} is damaged: {text}", param="model")
    return ends


def read_sampling(folder: Path) -> dict[str, float]:
    """Return the values for sampling that generation_config.json recommends, by their names in ``SamplingParams``; none
    if one of them is out of range.

    Raises:
        ConfigError: it is damaged.
    """
    settings = _read_generation_config(folder) or {}
    found = {name: value for name in _SAMPLING if (value := settings.get(name)) is not None}
    try:
        params = SamplingParams(**found)
    except InvalidRequest as error:
        logger.warning("%s recommends nothing for sampling that could be used: %s", folder / _GENERATION, error)
        return {}
    return {name: getattr(params, name) for name in found}


def _read_generation_config(folder: Path) -> dict[str, Any] | None:
    """
    Raises:
        ConfigError: it is damaged.
    """
    file = folder / _GENERATION
    if not file.is_file():
        return None
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: {first_line(error)}", param="model") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file} is damaged: {settings!r:.80} is not a JSON object", param="model")
    return settings


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a checkpoint directory; those that an index names may not exist."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    index = folder / _WEIGHTS_INDEX
    if not index.is_file():
        others = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
        found = f"; {', '.join(others)} cannot be used, only safetensors" if others else ""
        if names := sorted(file.name for file in folder.iterdir() if file.suffix == SUFFIX):
            found += f"; to serve {' or '.join(names)}, name the file instead of its directory"
        raise ConfigError(f"{folder} has no {_WEIGHTS}{found}", param="model")
    try:
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index} is damaged: {error!r}", param="model") from error


def context_limit(config: PretrainedConfig) -> int | None:
    """Return the maximum number of tokens in a sequence, or None if the config does not say.

    With yarn it is the extended length: some model cards tell users to add only the rotary settings to the config
    (Peng et al. 2023, "YaRN"). With longrope the frequencies depend on the longest sequence of the whole batch: past
    the original length one request would change another's result. So the limit is the original length (Ding et al.
    2024, "LongRoPE").

    Raises:
        ConfigError: it leaves no token.
    """
    text = config.get_text_config()
    stated, ropes = getattr(text, "max_position_embeddings", None), _ropes(text)
    extended = [int(rope["original_max_position_embeddings"] * rope["factor"]) for rope in ropes if _is_extended(rope)]
    limits = [max([stated, *extended])] if stated else []
    limits += [length for rope in ropes if (length := _original_length(text, rope))]
    if limits and min(limits) < 1:
        raise ConfigError(f"the config limits sequences to {min(limits)} tokens", param="model")
    return min(limits, default=None)


def _ropes(text: PretrainedConfig) -> list[dict[str, Any]]:
    parameters = getattr(text, "rope_parameters", None) or {}
    return [p for p in parameters.values() if isinstance(p, dict)] or [parameters]


def _is_extended(rope: dict[str, Any]) -> bool:
    return bool(rope.get("rope_type") == "yarn" and rope.get("factor") and rope.get("original_max_position_embeddings"))


def _original_length(text: PretrainedConfig, rope: dict[str, Any]) -> int | None:
    if rope.get("rope_type") != "longrope":
        return None
    return rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)


def num_outputs(config: PretrainedConfig) -> int:
    """The width of the model's logits, which may leave out the last ids of its vocabulary, such as those of images."""
    text = config.get_text_config()
    return int(getattr(text, "output_vocab_size", None) or text.vocab_size)


def check_layer_types(config: PretrainedConfig) -> None:
    """Reject what the config alone reveals, before weights are read; the self-test finds the rest.

    Raises:
        ConfigError: the config names layer types whose memory of the past is not supported here.
    """
    text = config.get_text_config()
    known = _PAGED_LAYER_TYPES | _RECURRENT_LAYER_TYPES | NO_MIXING
    others = sorted(set(getattr(text, "layer_types", None) or ()) - known)
    if others:
        raise ConfigError(
            f"model family {text.model_type!r} has layers of type {', '.join(others)}, "
            "which cannot run on a paged KV cache",
            param="model",
        )


def has_recurrent_layers(config: PretrainedConfig) -> bool:
    """Whether any layer keeps a per-sequence state, as far as the config says."""
    return bool(_RECURRENT_LAYER_TYPES & set(getattr(config.get_text_config(), "layer_types", None) or ()))
