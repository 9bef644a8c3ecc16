"""A transformers model as a function of a ragged batch."""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedModel

from .....protocol.arrays import Int32


class RaggedForward:
    """Runs T tokens of several sequences as one row [1, T]. Masking is left to the attention kernel."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = model.device
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, token_ids: Int32, positions: Int32, rows: Int32) -> torch.Tensor:
        """Compute logits float32 [R, V] of the tokens at ``rows`` [R], for ``token_ids`` [T] at ``positions`` [T]."""
        kept = self._upload(rows)
        # use_cache: the default creates and fills a cache that is never read. No mask is passed: it would be ignored.
        output = self.model(
            input_ids=self._upload(token_ids)[None],
            position_ids=self._upload(positions)[None],
            use_cache=False,
            return_dict=True,
            **({"logits_to_keep": kept} if self._keeps_rows else {}),
        )
        logits: torch.Tensor = output.logits[0]
        return (logits if self._keeps_rows else logits[kept]).float()

    def _upload(self, array: Int32) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, torch.int64)
