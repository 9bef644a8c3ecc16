"""A transformers model as a function of a ragged batch."""

from __future__ import annotations

import inspect
from contextlib import nullcontext

import torch
from transformers import PreTrainedModel

from .....protocol.arrays import Int32
from ...attention.forward_context import PagedLayers, attending
from ...step import StepCut, StepInputs
from ..states import SequenceStates
from .lora import TorchAdapters
from .recurrent import going_on


class RaggedForward:
    """Runs T tokens of several sequences as one row [1, T]. Masking is left to the attention kernel."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = model.device
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Compute logits float32 [R, V] of the tokens at ``rows`` [R], for ``token_ids`` [T] at ``positions`` [T]. All
        are integers, of any size, on the model's device.
        """
        kept = rows.long()
        # use_cache: the default creates and fills a cache that is never read. No mask is passed: it would be ignored.
        output = self.model(
            input_ids=token_ids.long()[None],
            position_ids=positions.long()[None],
            use_cache=False,
            return_dict=True,
            **({"logits_to_keep": kept} if self._keeps_rows else {}),
        )
        logits: torch.Tensor = output.logits[0]
        return (logits if self._keeps_rows else logits[kept]).float()


class PagedForward:
    """A model whose attention has been switched to pages, with all that it reads besides its weights."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: PagedLayers,
        *,
        adapters: TorchAdapters | None = None,
        states: SequenceStates | None = None,
    ) -> None:
        """``adapters`` are hooked into the model; ``states`` are those of its recurrent layers."""
        self.model = model
        self.device = model.device
        self.layers = layers
        self._ragged = RaggedForward(model)
        self._adapters = adapters
        self._states = states

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        """Compute logits float32 [R + C, V] of the step's logit rows, and write its keys and values to their pages."""
        self.layers.kernel.begin_step(inputs)
        owners = inputs.token_adapters
        return self.run(
            *map(self._upload, (inputs.token_ids, inputs.positions, inputs.logit_rows)),
            cut=inputs.cut,
            adapters=None if owners is None else self._upload(owners),
        )

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        *,
        cut: StepCut | None,
        adapters: torch.Tensor | None,
    ) -> torch.Tensor:
        """As ``RaggedForward``, in a step that the attention kernel has been told. ``cut`` is that of the step;
        ``adapters`` int32 [T] are those of the tokens.
        """
        adapted = nullcontext() if self._adapters is None else self._adapters.applied(adapters)
        with attending(self.layers), going_on(self._states, cut), adapted:
            return self._ragged(token_ids, positions, rows)

    def _upload(self, array: Int32) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
