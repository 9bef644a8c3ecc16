"""An open GGUF file: its settings and tensors, after checks that it is a model of a kind that is supported."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, PoolingType, ReaderTensor
from gguf.quants import dequantize

from ......protocol.errors import ConfigError
from ..hub import first_line
from .architectures import BY_NAME

# Those of which transformers' reader knows enough. Like the others, they were checked against ordinary checkpoints.
_KNOWN_TO_TRANSFORMERS = (
    "gemma2", "gemma3", "lfm2", "llama", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe",
)  # fmt: skip
ARCHITECTURES = sorted({*_KNOWN_TO_TRANSFORMERS, *BY_NAME})
_MOST_ITEMS = 1 << 22  # in all lists of a file; each becomes an object, and large vocabularies have a quarter of that
_BLOCK = 256  # numbers; that many are in a block of any type, or a multiple of a block
_NO_MODELS = {"mmproj": "a projector for images or audio", "adapter": "an adapter", "imatrix": "statistics"}
_POOLINGS = (None, PoolingType.NONE, PoolingType.LAST)  # the last token's state is what embeddings are made of
# Parts of the names of architectures that write no text from left to right.
_OTHER_PURPOSES = {
    "embeddings": ("bert", "embed", "encoder"),
    "texts that are written in no order (diffusion)": ("dream", "llada", "rnd1", "diffusion"),
    "guesses of another model's tokens": ("eagle", "dflash"),
}


class _Reader(GGUFReader):
    """Reads settings three times as fast, as each of the million slices of numpy's class for mapped files is an object
    with a history. Notices where a file ends: beyond it a list of any length could be read, and up to there one that
    takes a hundred times as much memory as the file.
    """

    _num_items = 0

    @property
    def data(self) -> Any:
        return self._bytes

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._bytes = mapped.view(np.ndarray)

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, *order: Any, **orders: Any) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = super()._get(offset, dtype, count, *order, **orders)
        if len(found) < count:
            raise ValueError(f"it ends before byte {offset + found.itemsize * int(count)}")
        return found

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            self._num_items += int(self._get(orig_offs + 4, np.uint64)[0])
            if self._num_items > _MOST_ITEMS:
                raise ValueError(f"its lists have {self._num_items} items, the limit is {_MOST_ITEMS}")
        return super()._get_field_parts(orig_offs, raw_type)


class Part(NamedTuple):
    """One of the files of a model."""

    path: Path
    reader: GGUFReader


@dataclass(frozen=True)
class GgufFile:
    """A model in one file or several parts; the first part has the settings."""

    parts: list[Part]

    @property
    def path(self) -> Path:
        return self.parts[0].path

    @property
    def architecture(self) -> str:
        return str(self.value("general.architecture"))

    @cached_property
    def tensors(self) -> dict[str, ReaderTensor]:
        return {tensor.name: tensor for part in self.parts for tensor in part.reader.tensors}

    @cached_property
    def keys(self) -> list[str]:
        """The names of the settings of the architecture, without its prefix."""
        prefix = f"{self.architecture}."
        return [key.removeprefix(prefix) for key in self.parts[0].reader.fields if key.startswith(prefix)]

    def value(self, key: str) -> Any:
        """A setting by its full name; None if the file does not state it."""
        field = self.parts[0].reader.fields.get(key)
        return None if field is None else field.contents()

    def of_model(self, key: str) -> Any:
        """A setting of the architecture, by its name without prefix; None if the file does not state it."""
        return self.value(f"{self.architecture}.{key}")


def open_gguf(parts: list[Path]) -> GgufFile:
    """Open the parts of a model.

    Raises:
        ConfigError: one is damaged, or the model is of a kind that is not supported.
    """
    file = GgufFile([Part(path, _open(path)) for path in parts])
    check_kind(file)
    count, declared = len(file.tensors), file.value("split.tensors.count")
    if len(parts) > 1 and declared is not None and declared != count:
        raise ConfigError(f"the parts of {file.path} have {count} tensors, they should have {declared}", param="model")
    check_types(file)
    return file


def _open(path: Path) -> GGUFReader:
    try:
        return _Reader(path)
    except PermissionError as error:
        raise ConfigError(f"GGUF file {path} cannot be read: {error.strerror}", param="model") from error
    except Exception as error:  # it trusts what it reads: anything from IndexError to UnicodeDecodeError
        text = f"{path} is no GGUF file, or is damaged, incomplete or newer than the package gguf: {first_line(error)}"
        raise ConfigError(text, param="model") from error


def check_kind(file: GgufFile) -> None:
    """
    Raises:
        ConfigError: the file holds no model, or one of an architecture that is not supported.
    """
    kind, architecture = file.value("general.type"), file.value("general.architecture")
    if kind in _NO_MODELS or architecture == "clip":
        what = _NO_MODELS.get(kind, _NO_MODELS["mmproj"])
        raise ConfigError(f"{file.path} is {what} ({kind or architecture}), not a model", param="model")
    for purpose, parts in _OTHER_PURPOSES.items():
        if any(part in str(architecture) for part in parts):
            raise ConfigError(f"{file.path} is a model ({architecture}) for {purpose}", param="model")
    if file.of_model("attention.causal") is False or file.of_model("pooling_type") not in _POOLINGS:
        what = "attention in both directions, or embeddings not of the last token, or for ranking"
        raise ConfigError(f"{file.path} is a model ({architecture}) with {what}", param="model")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{file.path} is of architecture {architecture!r}, known are: {known}", param="model")
    if not file.tensors:
        raise ConfigError(f"{file.path} has no tensors", param="model")


def check_types(file: GgufFile) -> None:
    """
    Raises:
        ConfigError: a tensor is of a type whose numbers are not known.
    """
    known = {type_ for type_ in GGMLQuantizationType if _can_be_read(type_)}
    for tensor in file.tensors.values():
        if tensor.tensor_type not in known:
            names = ", ".join(sorted(type_.name for type_ in known))
            text = f"{tensor.name} in {file.path} is of type {tensor.tensor_type.name}, known are: {names}"
            raise ConfigError(text, param="model")


def _can_be_read(type_: GGMLQuantizationType) -> bool:
    from gguf.constants import GGML_QUANT_SIZES

    block, num_bytes = GGML_QUANT_SIZES[type_]
    try:
        dequantize(np.zeros((1, _BLOCK // block * num_bytes), np.uint8), type_)
    except NotImplementedError:
        return False
    return True
