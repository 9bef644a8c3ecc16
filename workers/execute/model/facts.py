"""What the rest of the pipeline must know about a model, however it was loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ....protocol.config import ModelConfig
from ....protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Progress = Callable[[int, int], None]  # (done, total), in tensors


def no_progress(done: int, total: int) -> None:
    """For callers that do not want to know."""


_UNKNOWN_CONTEXT = 1 << 20  # tokens; for a model that states no limit. The pool reduces it to what fits.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the rest of execute knows of a model, however it is computed."""

    model_type: str
    num_parameters: int
    vocab_size: int  # of the model: the width of its logits
    eos_token_ids: tuple[int, ...]  # sorted; from tokenizer and generation config together
    context_limit: int | None  # tokens; None: the model does not say
    hidden_size: int = 0  # channels of hidden states after the last norm; 0: they cannot be taken
    has_head: bool = True  # False: the checkpoint is that of a base model, whose logits mean nothing


def end_tokens(tokenizer: PreTrainedTokenizerFast, stated: list[int] | int | None) -> tuple[int, ...]:
    """The ids that end an answer, as ``ModelFacts`` has them: the tokenizer's, and those that a config states."""
    ids = {tokenizer.eos_token_id, *(stated if isinstance(stated, list) else [stated])} - {None}
    return tuple(sorted(int(token_id) for token_id in ids))


def take_device(name: str) -> torch.device:
    """Resolve the device and make it this thread's current one, the only one that Triton, events and graphs use."""
    device = resolve_device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def resolve_device(name: str) -> torch.device:
    """Return the named device; "auto" is CUDA if available, else the CPU.

    Raises:
        ConfigError: this machine has no such device.
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
    """Return the maximum sequence length in tokens: the configured one, or else the model's limit.

    Raises:
        ConfigError: the configured length exceeds the model's limit.
    """
    limit = facts.context_limit or _UNKNOWN_CONTEXT
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the limit of the model is {limit}", param="max_model_len"
        )
    return config.max_model_len or limit
