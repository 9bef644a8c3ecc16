"""What the rest of the pipeline must know about a model, whichever way it was loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ....protocol.config import ModelConfig
from ....protocol.errors import ConfigError

Progress = Callable[[int, int], None]  # (done, total), in tensors

_UNKNOWN_CONTEXT = 1 << 20  # tokens; of a model that names no limit. The pool cuts it to what there is.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    model_type: str
    num_parameters: int
    vocab_size: int  # of the model: the width of its logits
    eos_token_ids: tuple[int, ...]  # sorted; of tokenizer and generation config together
    context_limit: int | None  # tokens; None: the model does not say


def take_device(name: str) -> torch.device:
    """``resolve_device``, made this thread's own: Triton, events and graphs know no other than the current one."""
    device = resolve_device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def resolve_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one.

    Raises:
        ConfigError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices", param="device"
        )
    return device


def wanted_len(config: ModelConfig, facts: ModelFacts) -> int:
    """Tokens of the longest sequence: what was asked for, or what the model can.

    Raises:
        ConfigError: more was asked for than the model can.
    """
    limit = facts.context_limit or _UNKNOWN_CONTEXT
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the limit of the model is {limit}", param="max_model_len"
        )
    return config.max_model_len or limit
