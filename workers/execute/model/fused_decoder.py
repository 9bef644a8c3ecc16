"""A dense decoder as a function of a step: matrix products by torch, everything between them in one kernel each.

Axes: T tokens of the step, C channels of the hidden state, H query heads, D channels of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..attention.device_step import DeviceStep
from ..attention.interface import AttentionForm, LayerCache
from ..kernels.triton_rows import add_norm, silu_mul
from ..kernels.triton_write import rotate_and_write
from .device_forward import DeviceAttention
from .fused_lora import FusedAdapters, add_to
from .fused_weights import FusedWeights


class FusedDecoder:
    """Owns its pages. A ``DeviceForward``: nothing in it waits for the device."""

    def __init__(
        self,
        weights: FusedWeights,
        kernel: DeviceAttention,
        caches: list[LayerCache],
        *,
        rope: tuple[torch.Tensor, torch.Tensor],
        adapters: FusedAdapters | None = None,
    ) -> None:
        """``caches`` has the pages of each layer; ``rope`` the cosines and sines of all positions."""
        self._weights = weights
        self._kernel = kernel
        self._adapters = adapters or FusedAdapters(weights, ())
        self.caches = caches
        spec = weights.spec
        self.device = device = weights.embedding.device
        self._rope = (rope[0].to(device).contiguous(), rope[1].to(device).contiguous())
        self._forms = [AttentionForm(spec.attention_multiplier, layer.window) for layer in weights.layers]
        self.vocab_size = spec.vocab_size

    def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
        weights, spec, eps = self._weights, self._weights.spec, self._weights.spec.norm_eps
        multiplier = spec.residual_multiplier
        foreign = self._adapters.foreign_to(step.adapters)
        self._kernel.use(step)
        x = F.embedding(token_ids, weights.embedding)
        if spec.embedding_multiplier != 1.0:
            x = x * spec.embedding_multiplier
        residual = torch.empty_like(x)
        is_first = True
        layers = zip(weights.layers, self._adapters.layers, self.caches, self._forms, strict=True)
        for layer, added, cache, form in layers:
            x = add_norm(x, residual, layer.attention_norm, eps, adds=not is_first, multiplier=multiplier)
            query = rotate_and_write(
                add_to(layer.qkv(x), x, added.qkv, foreign),
                *cache,
                slots=step.slot_mapping,
                positions=step.positions,
                rope=self._rope if layer.turns else None,
                norms=layer.qk_norms,
                norm_eps=eps,
                num_heads=spec.num_heads,
            )
            x = self._kernel.attend(cache, query, form).flatten(1)
            x = add_to(layer.output(x), x, added.output, foreign)
            x = add_norm(x, residual, layer.mlp_norm, eps, multiplier=multiplier)
            x = silu_mul(add_to(layer.gate_up(x), x, added.gate_up, foreign))
            x = add_to(layer.down(x), x, added.down, foreign)
            is_first = False
        rows = step.sample_rows.long()
        x = add_norm(x[rows], residual[rows], weights.final_norm, eps, multiplier=multiplier)
        return weights.head(x).float()
