"""A transformers model as a function of a step in device memory."""

from __future__ import annotations

import torch

from ...attention.device_step import DeviceStep
from ..checkpoint.find import num_outputs
from ..device.forward import DeviceAttention
from .forward import PagedForward
from .hidden_states import HiddenStates


class TransformersForward:
    """A ``DeviceForward``."""

    def __init__(self, forward: PagedForward, kernel: DeviceAttention) -> None:
        """``kernel`` is that of ``forward``."""
        self._forward = forward
        self._kernel = kernel
        self._hidden_states = HiddenStates(forward.model)
        self.vocab_size = num_outputs(forward.model.config)

    def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
        self._kernel.use(step)
        with self._hidden_states.left_in(step.taken):
            return self._forward.run(token_ids, step.positions, step.logit_rows, cut=step.cut, adapters=step.adapters)
