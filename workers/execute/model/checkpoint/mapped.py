"""The tensors of a checkpoint directory, mapped into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ...kernels.matrix import FourBits, Mxfp4
from ...kernels.structures import Format
from ..give_back import forget_mapped
from .find import weight_files
from .text_part import text_names

Names = Callable[[Iterable[str]], Mapping[str, str]]  # stored tensor names -> {requested name: stored name}


class Checkpoint(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint directory by name, memory-mapped: reading one allocates no memory.

    Of a multimodal model, only the tensors of its text part, by their names in a text-only model.
    """

    quantised_format: Format | None = None  # of the stored matrices of layers; None: plain numbers

    def __init__(self, folder: Path, names: Names = text_names) -> None:
        files: dict[str, Any] = {}
        self._paths = weight_files(folder)
        with ExitStack() as stack:
            for path in self._paths:
                file = stack.enter_context(safe_open(path, framework="pt"))
                files.update(dict.fromkeys(file.keys(), file))
            stack.pop_all()  # the files stay open as long as this object lives
        self._stored = names(files)
        self._files = {name: files[stored] for name, stored in self._stored.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(self._stored[name])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def has_four_bits(self, name: str) -> bool:
        """Whether this weight is stored in four bits; such a weight is in ``shapes``, but not in the mapping."""
        return False

    def four_bits(self, name: str) -> FourBits | Mxfp4:
        """A weight for which ``has_four_bits`` is true."""
        raise KeyError(name)

    def made(self, names: Iterable[str]) -> dict[str, Callable[[], torch.Tensor]]:
        """The functions that make those of these tensors that are not mapped, but computed at every read."""
        return {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.shape(name) for name in self._files}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as stored."""
        return tuple(self._slice(name).get_shape())

    def types(self) -> dict[str, str]:
        """The types of all tensors as stored, by safetensors' names: "F32", "BF16", ..."""
        return {name: self._slice(name).get_dtype() for name in self._files}

    def _slice(self, name: str) -> Any:
        return self._files[name].get_slice(self._stored[name])

    def forget(self) -> None:
        """Release the memory of everything read so far; later reads, such as embedding rows, come from the files again.

        Tensors stay valid, but changes written to them are lost: they are mapped for reading only.
        """
        forget_mapped(self._paths)
