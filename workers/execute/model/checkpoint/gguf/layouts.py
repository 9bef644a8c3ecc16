"""Which weight of a model each tensor of a GGUF file belongs to, and what was done to it.

transformers knows some architectures, in two forms, an older one and a newer one. The others are in a table of our own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf.utils import get_gguf_conversion_mapping, is_gguf_arch_supported
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from .architecture import NAMES, Architecture
from .architectures import FAMILIES, family_of
from .file import GgufFile

LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_SUFFIXES = (".weight", ".bias")
Values = Callable[[str], npt.NDArray[np.float32]]  # name of a tensor -> its numbers


class Layout(Protocol):
    def weight_of(self, name: str) -> str | None:
        """The weight of the model that a tensor belongs to, or None."""

    def make(self, weight: str, sources: Iterable[str], values: Values) -> torch.Tensor:
        """Return a weight of the model in float32, made of the tensors that belong to it."""


def layout_of(file: GgufFile, model: PreTrainedModel) -> Layout:
    if (family := family_of(file)) is not None:
        return _Table(FAMILIES[family], file, model)
    architecture = file.architecture
    return _Converters(architecture, model) if is_gguf_arch_supported(architecture) else _Processor(architecture, model)


class _Table:
    """Our own form: the names of the package gguf and what they leave out, and a function for weights that need one."""

    def __init__(self, architecture: Architecture, file: GgufFile, model: PreTrainedModel) -> None:
        self._config, self._steps = model.config, architecture.steps
        number = {name: number for number, name in MODEL_ARCH_NAMES.items()}[file.architecture]
        self._known = get_tensor_name_map(number, file.of_model("block_count"))
        self._named = (*architecture.names, *NAMES)
        self._parts = {weight: self._parts_of(weight, file) for weight in model.state_dict()}
        self._weights = {name: weight for weight, (names, _) in self._parts.items() for name in names}

    def weight_of(self, name: str) -> str | None:
        return self._weights.get(name)

    def make(self, weight: str, sources: Iterable[str], values: Values) -> torch.Tensor:
        names, join = self._parts[weight]
        parts = [torch.from_numpy(values(name)) for name in names]
        whole = parts[0] if len(parts) == 1 else join(parts)
        for pattern, step in self._steps:
            if re.search(pattern, weight):
                return step(whole, self._config)
        return whole

    def _parts_of(self, weight: str, file: GgufFile) -> tuple[list[str], Callable[[list[torch.Tensor]], torch.Tensor]]:
        """The tensors a weight is made of, and how they are joined."""
        layer = LAYER.search(weight)
        prefix = f"blk.{layer[1]}." if layer else ""
        for named in self._named:
            names = [prefix + name for name in named.tensors]
            if re.search(named.weights, weight) and file.tensors.keys() >= set(names):
                return names, named.join
        stem, dot, suffix = weight.rpartition(".") if weight.endswith(_SUFFIXES) else (weight, "", "")
        return [f"{self._known.get_name(stem)}{dot}{suffix}"], torch.cat


class _Processor:
    """The older form: a table of names, and a function for each family."""

    def __init__(self, architecture: str, model: PreTrainedModel) -> None:
        processor: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self._processor = processor(config=model.config.to_dict())
        self._names: dict[str, str] = get_gguf_hf_weights_map(_Whole(model), self._processor)

    def weight_of(self, name: str) -> str | None:
        return self._names.get(name) or self._names.get(name.removesuffix(".weight"))

    def make(self, weight: str, sources: Iterable[str], values: Values) -> torch.Tensor:
        made: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
        for name in sources:
            result = self._processor.process(
                weights=values(name), name=name, tensor_key_mapping=self._names, parsed_parameters=made
            )
            if result.name is not None:  # otherwise it was put there by the processor
                made["tensors"][weight] = torch.from_numpy(np.ascontiguousarray(result.weights))
        return made["tensors"][weight]


class _Whole:
    """Stands in for a model whose names are all in its own ``state_dict``: transformers would list those of each child
    again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.config, self.state_dict = model.config, model.state_dict

    def named_children(self) -> list[tuple[str, Any]]:
        return []


class _Converters:
    """The newer form: rules for names, and operations for those weights that need more."""

    def __init__(self, architecture: str, model: PreTrainedModel) -> None:
        self._model = model
        rules = get_gguf_conversion_mapping(architecture, model.config)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._weights = model.state_dict().keys()

    def weight_of(self, name: str) -> str | None:
        weight, _ = self._renamed(name)
        return weight if weight in self._weights else None

    def make(self, weight: str, sources: Iterable[str], values: Values) -> torch.Tensor:
        ready: Any = None
        for name in sorted(sources):  # as transformers reads them, so that joined ones are in order
            tensor = torch.from_numpy(values(name))
            _, pattern = self._renamed(name)
            if pattern is None:
                return tensor
            ready = ready or deepcopy(next(rule for rule in self._converters if pattern in rule.source_patterns))
            ready.add_tensor(weight, name, pattern, tensor)
        made = ready.convert(weight, model=self._model, config=self._model.config)[weight]
        whole: torch.Tensor = made[0] if isinstance(made, list) else made
        return whole

    def _renamed(self, name: str) -> tuple[str, str | None]:
        found: tuple[str, str | None] = rename_source_key(name, self._renamings, self._converters)
        return found
