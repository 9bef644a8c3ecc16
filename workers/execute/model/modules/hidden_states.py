"""Takes hidden states out of a forward pass of transformers' modules, without the head for their rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...attention.device_step import Taken


class HiddenStates:
    """A hook on the base of a model, which is all of it but the head; keeps what that puts out."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._wanted: Taken | None = None
        if hidden_size(model):
            model.base_model.register_forward_hook(self._take)

    @contextmanager
    def left_in(self, taken: Taken | None) -> Iterator[None]:
        """Within this block a forward pass of a ragged batch [1, T] leaves the wanted states there."""
        self._wanted = taken
        try:
            yield
        finally:
            self._wanted = None

    def _take(self, base: nn.Module, arguments: Any, output: Any) -> None:
        if self._wanted is not None:
            self._wanted.states = output[0][0, self._wanted.rows]


def hidden_size(model: PreTrainedModel) -> int:
    """Channels of its hidden states; 0 if the model is not a head on a base model, which alone puts them out."""
    if model.base_model is model:
        return 0
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):  # of some models, the base model projects them to what the head reads
        return head.in_features
    return int(getattr(model.config.get_text_config(), "hidden_size", 0))


def head_names(model: PreTrainedModel) -> set[str]:
    """The names of the parameters of its head."""
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head]
    return {f"{name}.{own}" for name in names for own, _ in head.named_parameters(recurse=False)}
