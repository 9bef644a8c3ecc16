"""Makes an ordinary checkpoint directory of a GGUF file, tensor by tensor: the whole model is never in memory."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from ......protocol.errors import ConfigError
from ...facts import Progress
from ...give_back import trim_heap
from .file import GgufFile, open_gguf
from .mxfp4 import QUANTISATION, kept
from .settings import read_settings
from .tensors import GgufTensors
from .vocabulary import write_generation_config, write_tokenizer_files

_SHARD_BYTES = 512 << 20  # so much is held in memory before it is written
_MARGIN_BYTES = 64 << 20  # for all files that have no weights
_INDEX = "model.safetensors.index.json"
_NAME = "model.gguf"


def unpack(parts: list[Path], target: Path, *, dtype: str, progress: Progress) -> None:
    """Write the checkpoint of a model in GGUF files to ``target``, an empty directory.

    Raises:
        ConfigError: a file is damaged or of a kind that is not supported, or there is no room for the checkpoint.
        OSError: it cannot be written.
    """
    type_: torch.dtype = getattr(torch, dtype)
    try:
        _unpack(open_gguf(parts), target, type_, progress)
    except (ConfigError, OSError):
        raise
    except Exception as error:  # settings of the wrong type, which three libraries trust
        raise ConfigError(f"{parts[0]} cannot be unpacked, it may be damaged: {error!r}", param="model") from error
    finally:
        trim_heap()  # the rest of this process's life has no use for it


def _unpack(file: GgufFile, target: Path, dtype: torch.dtype, progress: Progress) -> None:
    check_room(file, target, dtype)
    with tempfile.TemporaryDirectory(dir=target.parent) as beside:
        # Alone in a directory, as transformers also looks for a config and a tokenizer next to a file.
        (Path(beside) / _NAME).symlink_to(file.path)
        config = read_settings(file, Path(beside), _NAME)
        tensors = GgufTensors(file, config)
        if kept(file):
            config.quantization_config = dict(QUANTISATION)
        _write_config(config, type(tensors.skeleton).__name__, dtype, target)
        write_tokenizer_files(file, Path(beside), _NAME, target)
    write_generation_config(file, target)
    _write_shards(tensors.read(dtype, progress), target)


def check_room(file: GgufFile, folder: Path, dtype: torch.dtype) -> None:
    """
    Raises:
        ConfigError: the disk of ``folder`` has too little space for the weights.
    """
    as_they_are = kept(file)
    needed = _MARGIN_BYTES
    for name, tensor in file.tensors.items():
        needed += int(tensor.n_bytes if name in as_they_are else tensor.n_elements * dtype.itemsize)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"unpacking {file.path} takes {needed / 1e9:.1f} GB, and {folder.parent.parent} has {free / 1e9:.1f} GB "
            "free (XDG_CACHE_HOME names another place)",
            param="model",
        )


def _write_config(config: PretrainedConfig, class_name: str, dtype: torch.dtype, target: Path) -> None:
    config.architectures = [class_name]
    config.dtype = dtype
    config.save_pretrained(target)


def _write_shards(weights: Iterable[dict[str, torch.Tensor]], target: Path) -> None:
    """Write the weights to files of limited size, and which is where to the index."""
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = held = 0

    def write() -> None:
        name = f"model-{len(set(places.values())) + 1:05}.safetensors"
        save_file(shard, target / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for group in weights:
        num_bytes = sum(tensor.nbytes for tensor in group.values())
        if held and held + num_bytes > _SHARD_BYTES:
            write()
            held = 0
        shard |= group
        held, total = held + num_bytes, total + num_bytes
    write()
    (target / _INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1))
