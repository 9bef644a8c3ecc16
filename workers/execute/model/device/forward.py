"""What the runner on a GPU requires of a model, and of its attention kernel: a step is read from device memory."""

from __future__ import annotations

from typing import Protocol

import torch

from ...attention.device_step import DeviceStep
from ...attention.interface import PagedAttention


class DeviceAttention(PagedAttention, Protocol):
    """A kernel that reads its step from device memory."""

    def use(self, step: DeviceStep) -> None: ...


class DeviceForward(Protocol):
    """Writes keys and values to the pages, returns the wanted logits, and leaves hidden states in the step's ``taken``.
    Reads nothing back to the host.
    """

    vocab_size: int

    def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute logits float32 [R + C, V], those of ``step.logit_rows``. ``token_ids`` int [T] replace the step's
        own: carried tokens are filled in.
        """
        ...
