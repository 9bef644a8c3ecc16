"""The runner for transformers models: one ragged forward pass and one sampler call per step."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext

import numpy as np
import torch
from transformers import PreTrainedModel

from ...attention.device_step import Taken
from ...attention.forward_context import PagedLayers, attending
from ...sampling.sampler import Sampler
from ...step import StepInputs, StepResult, resolve
from ..states import SequenceStates
from ..step_runner import StepRunner
from .forward import RaggedForward
from .hidden_states import HiddenStates
from .lora import TorchAdapters
from .recurrent import going_on


class TorchRunner(StepRunner):
    """Owns the model and, in ``layers``, the pages."""

    adapters: TorchAdapters | None = None  # hooked into the model
    states: SequenceStates | None = None  # of its recurrent layers

    def __init__(self, model: PreTrainedModel, layers: PagedLayers, sampler: Sampler, **sizes: int) -> None:
        """``sizes`` are those of ``StepRunner``."""
        super().__init__([pool for cache in layers.caches.values() for pool in cache.pools], **sizes)
        self._forward = RaggedForward(model)
        self._hidden_states = HiddenStates(model)
        self._layers = layers
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
        """Compute logits float32 [R + C, V] of the step's logit rows, and write its keys and values to their pages."""
        self._layers.kernel.begin_step(inputs)
        adapted = nullcontext() if self.adapters is None else self.adapters.applied(inputs)
        with attending(self._layers), going_on(self.states, inputs.cut), adapted:
            return self._forward(inputs.token_ids, inputs.positions, inputs.logit_rows)
