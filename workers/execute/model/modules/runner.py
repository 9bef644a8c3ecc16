"""The runner for transformers models: one ragged forward pass and one sampler call per step."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from ...attention.device_step import Taken
from ...sampling.sampler import Sampler
from ...step import StepInputs, StepResult, resolve
from ..step_runner import StepRunner
from .forward import PagedForward
from .hidden_states import HiddenStates


class TorchRunner(StepRunner):
    """Owns the model and, in its layers, the pages."""

    def __init__(self, forward: PagedForward, sampler: Sampler, **sizes: int) -> None:
        """``sizes`` are those of ``StepRunner``."""
        super().__init__([pool for cache in forward.layers.caches.values() for pool in cache.pools], **sizes)
        self._forward = forward
        self._hidden_states = HiddenStates(forward.model)
        self._sampler = sampler
        self._results: deque[StepResult] = deque()
        self._last_tokens = np.empty(0, dtype=np.int32)  # of the step launched last

    def launch(self, inputs: StepInputs) -> None:
        """Compute the step synchronously, as on a CPU there is no device to wait for."""
        result = self._compute(resolve(inputs, self._last_tokens))
        self._last_tokens = result.token_ids
        self._results.append(result)

    def collect(self) -> StepResult:
        return self._results.popleft()

    @torch.inference_mode()
    def _compute(self, inputs: StepInputs) -> StepResult:
        masks = self._masks.begin(inputs.sampled)
        taken = None
        if inputs.embedded:
            taken = Taken(torch.from_numpy(inputs.embedded_rows).to(self._forward.device, torch.int64))
        with self._hidden_states.left_in(taken):
            logits = self.compute_logits(inputs)
        return self._sampler.finish(logits, inputs, masks, hidden=None if taken is None else taken.to_host())

    @torch.inference_mode()
    def compute_logits(self, inputs: StepInputs) -> torch.Tensor:
        """See ``PagedForward``."""
        return self._forward(inputs)
