"""How a transformers model calls our attention: a registered function, and a context variable per forward pass.

The function is called by every attention layer of every model that was switched to ``IMPLEMENTATION``. What it does
with the layer's queries, keys and values is not passed through the model (some families do not pass keyword arguments
on to their layers) but set around the forward pass, in the context variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from .interface import AttentionForm, LayerCache, PagedAttention

IMPLEMENTATION = "triptych"  # must not begin with "paged|", which transformers strips


class LayerAttention(Protocol):
    """What a forward pass does in an attention layer. Axes as in ``interface``."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: AttentionForm
    ) -> torch.Tensor:
        """Outputs [T, H, E] of queries [T, H, D], keys [T, J, D] and values [T, J, E]."""
        ...


class PagedLayers:
    """The usual ``LayerAttention``: a kernel over the pages of every layer."""

    def __init__(self, kernel: PagedAttention, caches: Mapping[int, LayerCache]) -> None:
        self.kernel = kernel
        self.caches = caches

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: AttentionForm
    ) -> torch.Tensor:
        cache = self.caches[layer]
        self.kernel.write(cache, key, value)
        return self.kernel.attend(cache, query, form)


_current: ContextVar[LayerAttention] = ContextVar("triptych_layer_attention")


@contextmanager
def attending(layers: LayerAttention) -> Iterator[None]:
    """Forward passes in this block attend through ``layers``."""
    token = _current.set(layers)
    try:
        yield
    finally:
        _current.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Called by transformers with [1, heads, T, channels], keys rotated and not repeated; returns [1, T, H, E]."""
    if attention_mask is not None:  # transformers makes none for us: the kernel handles causality and windows
        raise ValueError("the layer makes an attention mask of its own")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    form = AttentionForm(scale, sliding_window, softcap, s_aux)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return _current.get()(module.layer_idx, q, k, v, form)[None], None  # type: ignore[arg-type]


def use_paged_attention(model: PreTrainedModel) -> None:
    """Route the model's attention layers through ``attending``. From then on the model only runs in such a block."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    model.set_attn_implementation(IMPLEMENTATION)
