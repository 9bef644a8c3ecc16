"""The weights of a GGUF file by the names and in the layout of an ordinary checkpoint, a few at a time."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import ReaderTensor
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from .....protocol.errors import ConfigError
from ..facts import Progress
from ..give_back import forget_mapped
from .file import GgufFile
from .settings import ROPE_FACTORS

_RUN = 1 << 20  # numbers dequantised at a time and thread


class GgufTensors:
    """Every tensor of the file has a place in the model, and every weight of the model comes from the file."""

    def __init__(self, file: GgufFile, config: PretrainedConfig) -> None:
        """
        Raises:
            ConfigError: a tensor has no place, or a weight is missing.
        """
        self._file = file
        self.skeleton = _skeleton(config)
        processor: Any = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)
        self._processor = processor(config=config.to_dict())
        self._names: dict[str, str] = get_gguf_hf_weights_map(_Whole(self.skeleton), self._processor)
        self._sources = self._find_sources()

    def _find_sources(self) -> dict[str, list[str]]:
        """Return the names of the tensors that each weight of the model is made of."""
        sources = defaultdict(list)
        for name in self._file.tensors:
            weight = self._names.get(name) or self._names.get(name.removesuffix(".weight"))
            if weight is not None:
                sources[weight].append(name)
            elif name != ROPE_FACTORS:
                what = type(self.skeleton).__name__
                raise ConfigError(f"{name} in {self._file.path} has no place in {what}", param="model")
        wanted = self.skeleton.state_dict().keys()
        made_of_others = getattr(self.skeleton, "all_tied_weights_keys", None) or {}
        if missing := sorted(wanted - sources.keys() - set(made_of_others)):
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
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            for weight, sources in self._sources.items():
                made = self._make(weight, sources, threads)
                if _without_ones(made.shape) != _without_ones(shapes[weight]):
                    text = f"{sources[0]} in {self._file.path} has shape {tuple(made.shape)}"
                    raise ConfigError(f"{text}, its settings say {shapes[weight]}", param="model")
                yield self._as_stored(weight, made.reshape(shapes[weight]).to(dtype))
                del made
                forget_mapped(part.path for part in self._file.parts)
                progress(done := done + len(sources), total)

    def _make(self, weight: str, sources: list[str], threads: ThreadPoolExecutor) -> torch.Tensor:
        """Return a weight of the model in float32."""
        made: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
        for name in sources:
            result = self._processor.process(
                weights=_values(self._file.tensors[name], threads),
                name=name,
                tensor_key_mapping=self._names,
                parsed_parameters=made,
            )
            if result.name is not None:  # otherwise it was put there by the processor
                made["tensors"][weight] = torch.from_numpy(np.ascontiguousarray(result.weights))
        return made["tensors"][weight]

    def _as_stored(self, weight: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same in the form in which checkpoints of this family are published: experts one by one, for example."""
        stored: Mapping[str, torch.Tensor] = revert_weight_conversion(self.skeleton, {weight: tensor})
        return {name: part.contiguous() for name, part in stored.items()}


class _Whole:
    """A model of which transformers looks at the whole only, not at every module in it again."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config, self.state_dict = model.config, model.state_dict

    def named_children(self) -> list[tuple[str, Any]]:
        return []


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


def _values(tensor: ReaderTensor, threads: ThreadPoolExecutor) -> npt.NDArray[np.float32]:
    """The numbers of a tensor [..., inputs], dequantised."""
    shape = [int(size) for size in reversed(tensor.shape)]
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    values = np.empty((len(rows), shape[-1]), np.float32)
    step = max(1, _RUN // shape[-1])

    def fill(start: int) -> None:
        values[start : start + step] = dequantize(rows[start : start + step], tensor.tensor_type)

    list(threads.map(fill, range(0, len(rows), step)))
    return values.reshape(shape)
