"""Reading a LoRA adapter as PEFT saves it: checks its config field by field and computes its scales.

Source: LoRA, Hu et al. 2021; rank-stabilised scales: Kalajdzievski 2023.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ....protocol.errors import ConfigError
from ....protocol.lora import MAX_RANK, LoraModule
from .checkpoint.stored_weights import usual_name
from .checkpoint.text_part import text_name

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
# Fields besides ranks and scales that affect what an adapter computes, and the only values that are supported.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # other values modify the model's own weights
    "task_type": ("CAUSAL_LM",),
}
# Fields that only concern training, or repeat what the tensors say.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "ephemeral_gpu_offload",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_dropout", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules",
}  # fmt: skip
_SCALES = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
_MAX_CONFIG_BYTES = 1 << 20
_MULTIPLE = 8  # columns per adapter are padded to this: 16 bytes in half precision, as matrix products require
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class LowRank(NamedTuple):
    """``b @ a`` is added to a matrix [outputs, inputs]."""

    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # float32 [outputs, rank], includes the adapter's scale


class Adapter(NamedTuple):
    """What an adapter adds, by the names of linear modules."""

    name: str
    updates: Mapping[str, LowRank]

    def refused(self, why: str) -> ConfigError:
        return _refused(self.name, why)

    def check_modules(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check the adapter against ``shapes`` [outputs, inputs] of the linear modules that can be adapted.

        Raises:
            ConfigError: it adapts a module that is not among them, or one of another shape.
        """
        for module, (a, b) in self.updates.items():
            if module not in shapes:
                raise self.refused(
                    f"it changes {module}, which is not a linear layer of this model that can be adapted"
                )
            if (shape := (len(b), a.shape[1])) != tuple(shapes[module]):
                raise self.refused(f"{module} is {list(shapes[module])} in the model, and {list(shape)} in the adapter")


class Columns:
    """The columns of each adapter, the same for all matrices that any of them changes: as many as its greatest rank, or
    a few more as padding.
    """

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        ranks = [max(len(update.a) for update in adapter.updates.values()) for adapter in adapters]
        self.widths = [-(-rank // _MULTIPLE) * _MULTIPLE for rank in ranks]
        *self.starts, self.count = accumulate(self.widths, initial=0)


def load_adapters(modules: Iterable[LoraModule], family: str | None = None) -> list[Adapter]:
    """Load the adapters in these folders, which may use the names that models of the family are published with.

    Raises:
        ConfigError: an adapter is damaged, or is more than a low-rank addition to linear layers.
    """
    return [_load(module, family) for module in modules]


def _load(module: LoraModule, family: str | None) -> Adapter:
    config_file, weights_file = module.files
    scales = _read_scales(module.name, config_file)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(weights_file, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, not a mapping
                if (match := _TENSOR.fullmatch(name)) is None:
                    raise _refused(module.name, f"its tensor {name} is neither lora_A nor lora_B of a linear layer")
                found = sides.setdefault(match["module"], {})
                if match["side"] in found:
                    raise _refused(module.name, f"it has lora_{match['side']} of {match['module']} twice")
                found[match["side"]] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise _refused(module.name, f"{weights_file} is damaged: {error}") from error
    if not sides:
        raise _refused(module.name, f"{weights_file} has no tensors")
    updates = {
        usual_name(family, text_name(name)): _low_rank(module.name, name, sides[name], scales) for name in sorted(sides)
    }
    return Adapter(module.name, updates)


class _Scales(NamedTuple):
    rank: int
    alpha: float
    ranks: dict[str, int]
    alphas: dict[str, float]
    is_stabilised: bool

    def rank_of(self, module: str) -> int:
        return int(_of_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), _of_pattern(self.alphas, module, self.alpha)
        return float(alpha / rank**0.5 if self.is_stabilised else alpha / rank)


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Look up a module as PEFT does: by the first pattern that matches the end of its name."""
    return next((value for key, value in patterns.items() if re.match(_whole(key), module)), default)


def _whole(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _read_scales(name: str, file: Path) -> _Scales:
    try:
        if (num_bytes := file.stat().st_size) > _MAX_CONFIG_BYTES:
            raise ValueError(f"it has {num_bytes} bytes, the limit is {_MAX_CONFIG_BYTES}")
        config = json.loads(file.read_text(encoding="utf-8"))
        _check_config(name, config)
        ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
        for pattern in (*ranks, *alphas):
            re.compile(_whole(pattern))
        return _Scales(
            rank=_rank(config["r"]),
            alpha=_alpha(config["lora_alpha"]),
            ranks={key: _rank(value) for key, value in ranks.items()},
            alphas={key: _alpha(value) for key, value in alphas.items()},
            is_stabilised=_switch(config.get("use_rslora")),
        )
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, re.error,
    ) as error:  # fmt: skip
        raise _refused(name, f"{file} is damaged: {error!r}") from error


def _rank(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.80} is not a rank")
    return value


def _alpha(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r:.80} is not an alpha")
    return float(value)


def _switch(value: Any) -> bool:
    if value not in (None, True, False):
        raise ValueError(f"{value!r:.80} is neither true nor false")
    return bool(value)


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    for field, value in config.items():
        if field in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[field]:
                raise _refused(name, f"its {field} is {value!r:.80}, the one that can be served is {_known(field)}")
        elif field not in _WITHOUT_EFFECT | _SCALES and value:
            raise _refused(name, f"its {field} is {value!r:.80}, which cannot be served")


def _known(field: str) -> str:
    return " or ".join(map(repr, _NEUTRAL[field]))


def _low_rank(name: str, module: str, sides: Mapping[str, torch.Tensor], scales: _Scales) -> LowRank:
    if sides.keys() != {"A", "B"}:
        raise _refused(name, f"it has only lora_{''.join(sides)} of {module}")
    a, b = sides["A"], sides["B"]
    if unknown := {a.dtype, b.dtype} - _DTYPES:
        raise _refused(name, f"its weights of {module} have dtype {unknown.pop()}")
    rank = scales.rank_of(module)
    if not (a.dim() == b.dim() == 2 and len(a) == b.shape[1] == rank):
        raise _refused(name, f"its weights of {module} are {list(a.shape)} and {list(b.shape)}, the rank is {rank}")
    if not 1 <= rank <= MAX_RANK:
        raise _refused(name, f"the rank of {module} is {rank}, the limits are 1 and {MAX_RANK}")
    b = b.float() * scales.scale_of(module)
    if not (a.float().isfinite().all() and b.isfinite().all()):
        raise _refused(name, f"its weights of {module} are not finite")
    return LowRank(a, b)


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(f"the adapter {name!r} cannot be served: {why}", param="lora_modules")
