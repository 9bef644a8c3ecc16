"""The weights of a GGUF file by the names and in the layout of an ordinary checkpoint, a few at a time."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ......protocol.errors import ConfigError
from ...facts import Progress
from ...give_back import forget_mapped
from .file import GgufFile
from .layouts import layout_of
from .mxfp4 import in_blocks, kept
from .numbers import numbers_of
from .settings import OF_CONFIG, layer_of, unused_layers

_RUN = 1 << 20  # numbers dequantised at a time and thread


class GgufTensors:
    """Every tensor of the file has a place in the model, and every weight of the model comes from one or a setting."""

    def __init__(self, file: GgufFile, config: PretrainedConfig) -> None:
        """
        Raises:
            ConfigError: a tensor has no place, or a weight is missing.
        """
        self._file = file
        self.skeleton = _skeleton(config)
        self._layout = layout_of(file, self.skeleton)
        self._numbers = numbers_of(file, self.skeleton)
        self._sources = self._find_sources()
        self._kept = kept(file)

    def _find_sources(self) -> dict[str, list[str]]:
        """Return the names of the tensors that each weight of the model is made of."""
        sources, unused = defaultdict(list), unused_layers(self._file)
        for name in self._file.tensors:
            if (weight := self._layout.weight_of(name)) is not None:
                sources[weight].append(name)
            elif name not in OF_CONFIG and layer_of(name) not in unused:
                what = type(self.skeleton).__name__
                raise ConfigError(f"{name} in {self._file.path} has no place in {what}", param="model")
        wanted = self.skeleton.state_dict().keys()
        made_of_others = getattr(self.skeleton, "all_tied_weights_keys", None) or {}
        if missing := sorted(wanted - sources.keys() - self._numbers.keys() - set(made_of_others)):
            text = f"{self._file.path} lacks {len(missing)} of its weights, {missing[0]!r} first"
            raise ConfigError(text, param="model")
        return dict(sources)

    def read(self, dtype: torch.dtype, progress: Progress) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the weights of a checkpoint by name, those of one weight of the model at a time.

        Raises:
            ConfigError: a weight has another shape than the config says.
        """
        shapes = {name: tuple(weight.shape) for name, weight in self.skeleton.state_dict().items()}
        done, total = 0, len(self._file.tensors)
        for weight, number in self._numbers.items():
            yield self._as_stored(weight, torch.full(shapes[weight], number, dtype=dtype))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            for weight, sources in self._sources.items():
                if not self._kept.isdisjoint(sources):
                    yield in_blocks(weight, [self._file.tensors[name] for name in sorted(sources)])
                    forget_mapped(part.path for part in self._file.parts)
                    progress(done := done + len(sources), total)
                    continue
                made = self._layout.make(weight, sources, partial(self._values, threads))
                if _without_ones(made.shape) != _without_ones(shapes[weight]):
                    text = f"{sources[0]} in {self._file.path} has shape {tuple(made.shape)}"
                    raise ConfigError(f"{text}, its settings say {shapes[weight]}", param="model")
                yield self._as_stored(weight, made.reshape(shapes[weight]).to(dtype))
                del made
                forget_mapped(part.path for part in self._file.parts)
                progress(done := done + len(sources), total)

    def _as_stored(self, weight: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same in the form in which checkpoints of this family are published: experts one by one, for example."""
        stored: Mapping[str, torch.Tensor] = revert_weight_conversion(self.skeleton, {weight: tensor})
        return {name: part.contiguous() for name, part in stored.items()}

    def _values(self, threads: ThreadPoolExecutor, name: str) -> npt.NDArray[np.float32]:
        """The numbers of a tensor [..., inputs], dequantised."""
        tensor = self._file.tensors[name]
        shape = [int(size) for size in reversed(tensor.shape)]
        rows = tensor.data.reshape(-1, tensor.data.shape[-1])
        values = np.empty((len(rows), shape[-1]), np.float32)
        step = max(1, _RUN // shape[-1])

        def fill(start: int) -> None:
            values[start : start + step] = dequantize(rows[start : start + step], tensor.tensor_type)

        list(threads.map(fill, range(0, len(rows), step)))
        return values.reshape(shape)


def _skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model without memory for its weights."""
    from_config: Any = AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"):
            model: PreTrainedModel = from_config(config)
    except Exception as error:  # every family checks its config in its own way
        raise ConfigError(f"cannot build {config.model_type!r}: {error}", param="model") from error
    return model


def _without_ones(shape: Sequence[int]) -> list[int]:
    """Axes of size 1 come and go: tools that rewrite a file drop the outer ones."""
    return [size for size in shape if size != 1]
