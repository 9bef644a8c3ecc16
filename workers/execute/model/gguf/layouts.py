"""Which weight of a model each tensor of a GGUF file belongs to, and what was done to it: transformers' own knowledge.

transformers has it in two forms, an older one for most families and a newer one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf.utils import get_gguf_conversion_mapping, is_gguf_arch_supported
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

Values = Callable[[str], npt.NDArray[np.float32]]  # name of a tensor -> its numbers


class Layout(Protocol):
    def weight_of(self, name: str) -> str | None:
        """The weight of the model that a tensor belongs to, or None."""

    def make(self, weight: str, sources: Iterable[str], values: Values) -> torch.Tensor:
        """Return a weight of the model in float32, made of the tensors that belong to it."""


def layout_of(architecture: str, model: PreTrainedModel) -> Layout:
    return _Converters(architecture, model) if is_gguf_arch_supported(architecture) else _Processor(architecture, model)


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
    """A model of which transformers looks at the whole only, not at every module in it again."""

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
