"""A dense decoder as a function of a step: matrix products by torch, whatever lies between two products in one kernel.

Axes: T tokens of the step, C channels of the hidden state, H query heads, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ...attention.device_step import DeviceStep
from ...attention.interface import AttentionForm, LayerCache
from ...kernels.triton_lora import AdapterTiles
from ...kernels.triton_rows import add_norm, gate_mul, norm_queries_keys
from ...kernels.triton_write import rotate_and_write
from ..device.forward import DeviceAttention
from .experts import FusedExperts
from .lora import FusedAdapters, adapted
from .weights import FusedLayer, FusedWeights


class FusedDecoder:
    """Owns its pages. A ``DeviceForward``: nothing in it waits for the device."""

    def __init__(
        self,
        weights: FusedWeights,
        kernel: DeviceAttention,
        caches: list[LayerCache],
        *,
        ropes: Sequence[tuple[torch.Tensor, torch.Tensor]],
        adapters: FusedAdapters | None = None,
    ) -> None:
        """``caches`` are the pages of each layer; ``ropes`` are cosines and sines of all positions."""
        self._weights = weights
        self._kernel = kernel
        self._adapters = adapters or FusedAdapters(weights, ())
        self.caches = caches
        spec = weights.spec
        self.device = device = weights.embedding.device
        self._ropes = [(cosines.to(device).contiguous(), sines.to(device).contiguous()) for cosines, sines in ropes]
        self._forms = [
            AttentionForm(spec.attention_multiplier, layer.window, spec.score_cap) for layer in weights.layers
        ]
        self._embedding_multiplier = spec.embedding_multiplier
        if spec.rounds_embedding_multiplier:
            self._embedding_multiplier = float(torch.tensor(spec.embedding_multiplier, dtype=weights.format.dtype))
        self._is_plain = weights.has_plain_layers
        self.vocab_size = spec.vocab_size

    def __call__(
        self, step: DeviceStep, token_ids: torch.Tensor, *, choices: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Compute logits float32 [R + C, V]. Appends the tokens' choices of each layer with experts to ``choices``."""
        spec = self._weights.spec
        self._kernel.use(step)
        x = F.embedding(token_ids, self._weights.embedding)
        if self._embedding_multiplier != 1.0:
            x = x * self._embedding_multiplier
        tiles = self._adapters.rows_of(step.adapters)
        if self._is_plain and tiles is None and len(x) == 1 and step.taken is None:
            logits = self._one_row(step, x, choices)
        else:
            logits = self._many_rows(step, x, tiles, choices)
        return logits if spec.logit_cap is None else (logits / spec.logit_cap).tanh() * spec.logit_cap

    def _many_rows(
        self, step: DeviceStep, x: torch.Tensor, tiles: AdapterTiles | None, choices: list[torch.Tensor] | None
    ) -> torch.Tensor:
        weights, spec, eps = self._weights, self._weights.spec, self._weights.spec.norm_eps
        multiplier = spec.residual_multiplier
        residual = torch.empty_like(x)
        is_first, norm = True, None
        layers = zip(weights.layers, self._adapters.layers, self.caches, self._forms, strict=True)
        for layer, added, cache, form in layers:
            x = add_norm(
                x, residual, layer.attention_norm, eps, added_weight=norm, adds=not is_first, multiplier=multiplier
            )
            qkv = adapted(layer.qkv, x, added.qkv, tiles)
            x = self._attend(step, layer, cache, form, qkv)
            x = adapted(layer.output, x, added.output, tiles)
            x = add_norm(x, residual, layer.mlp_norm, eps, added_weight=layer.attended_norm, multiplier=multiplier)
            if isinstance(layer.mlp, FusedExperts):
                x = layer.mlp(x, choices)
            else:
                x = gate_mul(adapted(layer.mlp.gate_up, x, added.gate_up, tiles), spec.activation)
                x = adapted(layer.mlp.down, x, added.down, tiles)
            is_first, norm = False, layer.gated_norm

        def last(rows: torch.Tensor) -> torch.Tensor:
            return add_norm(x[rows], residual[rows], weights.final_norm, eps, added_weight=norm, multiplier=multiplier)

        if step.taken is not None:
            step.taken.states = last(step.taken.rows) * spec.logits_scaling  # by which the norm has divided them
        return weights.head(last(step.logit_rows.long())).float()

    def _one_row(self, step: DeviceStep, x: torch.Tensor, choices: list[torch.Tensor] | None) -> torch.Tensor:
        """The same for one token and ``has_plain_layers``, with four kernels for each layer besides attention's, or six
        with experts.
        """
        weights, spec, eps = self._weights, self._weights.spec, self._weights.spec.norm_eps
        multiplier = spec.residual_multiplier
        for layer, cache, form in zip(weights.layers, self.caches, self._forms, strict=True):
            qkv = layer.qkv.one_row(x, norm=layer.attention_norm, eps=eps)
            attended = self._attend(step, layer, cache, form, qkv)
            layer.output.one_row(attended, residual=x, multiplier=multiplier)
            if isinstance(layer.mlp, FusedExperts):
                layer.mlp.add_one_row(x, choices, norm=layer.mlp_norm, eps=eps, multiplier=multiplier)
                continue
            gated = layer.mlp.gate_up.one_row(x, norm=layer.mlp_norm, eps=eps, activation=spec.activation)
            layer.mlp.down.one_row(gated, residual=x, multiplier=multiplier)
        logits = weights.head.one_row(x, norm=weights.final_norm, eps=eps, dtype=torch.float32)
        return logits if len(step.logit_rows) == 1 else logits[step.logit_rows.long()]

    def _attend(
        self, step: DeviceStep, layer: FusedLayer, cache: LayerCache, form: AttentionForm, qkv: torch.Tensor
    ) -> torch.Tensor:
        """Attention's outputs [T, H * D] of a merged projection, whose keys and values it writes to their slots."""
        spec, norms = self._weights.spec, layer.qk_norms
        if norms is not None and spec.norms_whole_queries:
            norm_queries_keys(qkv, norms, spec.norm_eps)
            norms = None
        query = rotate_and_write(
            qkv,
            cache.keys,
            cache.values,
            scales=cache.scales,
            slots=step.slot_mapping,
            positions=step.positions,
            rope=None if layer.rope is None else self._ropes[layer.rope],
            norms=norms,
            norm_eps=spec.norm_eps,
            num_heads=spec.num_heads,
            growth=spec.query_growth,
            growth_span=spec.query_growth_span,
        )
        return self._kernel.attend(cache, query, form).flatten(1)
