"""A transformers model as a function of a step in device memory."""

from __future__ import annotations

import inspect
from contextlib import nullcontext

import torch
from transformers import PreTrainedModel

from ...attention.device_step import DeviceStep
from ...attention.forward_context import PagedLayers, attending
from ..device.forward import DeviceAttention
from ..states import SequenceStates
from .hidden_states import HiddenStates
from .lora import TorchAdapters
from .recurrent import going_on


class TransformersForward:
    """A ``DeviceForward`` whose attention has been switched to pages."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: PagedLayers,
        kernel: DeviceAttention,
        adapters: TorchAdapters | None = None,
        states: SequenceStates | None = None,
    ) -> None:
        """``adapters`` are hooked into the model; ``states`` are those of its recurrent layers."""
        self._model = model
        self._layers = layers
        self._kernel = kernel
        self._adapters = adapters
        self._states = states
        self._hidden_states = HiddenStates(model)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.vocab_size: int = model.config.get_text_config().vocab_size

    def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
        self._kernel.use(step)
        rows = step.logit_rows.long()
        adapted = nullcontext() if self._adapters is None else self._adapters.applied_to(step.adapters)
        hidden = self._hidden_states.left_in(step.taken)
        with attending(self._layers), going_on(self._states, step.cut), adapted, hidden:
            output = self._model(
                input_ids=token_ids.long()[None],
                position_ids=step.positions.long()[None],
                use_cache=False,
                return_dict=True,
                **({"logits_to_keep": rows} if self._keeps_rows else {}),
            )
        logits: torch.Tensor = output.logits[0]
        return (logits if self._keeps_rows else logits[rows]).float()
