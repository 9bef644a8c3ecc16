"""A dense decoder's weights on a device, merged where they share an input; each tensor is read straight into place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from ...kernels.triton_matmul import invariant_linear
from ...kernels.triton_one_row import MAX_INPUTS, fits_one_row, one_row_linear
from ..facts import Progress
from ..spec.decoder import DecoderSpec
from ..spec.layer_tensors import LayerTensors, bias_of
from .experts import FusedExperts
from .fp8 import Fp8Projection


class Projection(Protocol):
    """A matrix product with the weights of one or more linear layers of the checkpoint."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, inputs] to [T, outputs]."""
        ...

    def one_row(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """Map [1, inputs] with the ``options`` of ``one_row_linear``."""
        ...


class PlainProjection(NamedTuple):
    """A product in the dtype of the weights."""

    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = F.linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)

    def one_row(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return one_row_linear(x, self.weight, self.bias, **options)


class FusedMlp(NamedTuple):
    gate_up: Projection
    down: Projection


class FusedLayer(NamedTuple):
    qkv: Projection
    output: Projection
    mlp: FusedMlp | FusedExperts
    attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    attended_norm: torch.Tensor | None  # of what attention adds
    gated_norm: torch.Tensor | None  # of what the MLP adds
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None
    window: int | None
    rope: int | None  # the number of the rope that rotates queries and keys


class Format(NamedTuple):
    """How matrices are stored and multiplied."""

    dtype: torch.dtype  # of activations, and of weights without quantization
    is_fp8: bool = False
    is_invariant: bool = False  # a row's product does not depend on the other rows


@dataclass(slots=True)
class FusedWeights:
    """All weights of a decoder. Invariant: ``views`` is the same memory, by the tensors' names in the checkpoint.

    The exceptions are norms with something folded in, an offset or the logits' divisor: they are copies.

    With fp8, matrices are not kept in the checkpoint's dtype, so there is no view of any of the layers' matrices.
    """

    spec: DecoderSpec
    format: Format
    embedding: torch.Tensor
    head: Projection
    final_norm: torch.Tensor
    layers: list[FusedLayer]
    views: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def has_plain_layers(self) -> bool:
        """Whether layers have nothing but attention, norms of their inputs, gates or experts, and products whose inputs
        a program can hold.
        """
        spec = self.spec
        if self.format.is_invariant or not spec.has_pre_norms or spec.has_post_norms:
            return False
        if any(spec.has_experts) and not fits_one_row(spec.experts_per_token, spec.expert_size):
            return False
        return max(spec.hidden_size, spec.num_heads * spec.head_dim, spec.intermediate_size) <= MAX_INPUTS


class FusedLoader:
    """Copies a checkpoint to a device, each tensor once and straight into place."""

    def __init__(
        self,
        spec: DecoderSpec,
        checkpoint: Mapping[str, torch.Tensor],
        *,
        format_: Format,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self._spec = spec
        self._checkpoint = checkpoint
        self._format = format_
        self._device = device
        self._progress = progress
        self._shapes = spec.tensors()
        self._done, self._total = 0, len(self._shapes)
        self._views: dict[str, torch.Tensor] = {}

    def load(self) -> FusedWeights:
        spec = self._spec
        embedding = self._tensor(spec.embedding)
        head = embedding if spec.is_tied else self._tensor(spec.head)
        final_norm = self._norm(spec.final_norm)
        if spec.logits_scaling != 1.0:  # in float, so that the division costs no precision
            final_norm = final_norm.float() / spec.logits_scaling
        return FusedWeights(
            spec,
            self._format,
            embedding,
            self._plain(head, None),  # not quantized: its rounding would directly change which token wins
            final_norm,
            [self._layer(index) for index in range(spec.num_layers)],
            self._views,
        )

    def _layer(self, index: int) -> FusedLayer:
        spec, names = self._spec, self._spec.layer(index)
        return FusedLayer(
            qkv=self._merge(names.qkv, has_bias=spec.has_qkv_bias),
            output=self._merge((names.output,), has_bias=spec.has_output_bias),
            mlp=self._experts(names) if names.experts else self._mlp(names),
            attention_norm=self._norm(names.attention_norm) if spec.has_pre_norms else None,
            mlp_norm=self._norm(names.mlp_norm) if spec.has_pre_norms else None,
            attended_norm=self._norm(names.attended_norm) if spec.has_post_norms else None,
            gated_norm=self._norm(names.gated_norm) if spec.has_post_norms else None,
            qk_norms=(self._norm(names.query_norm), self._norm(names.key_norm)) if spec.has_qk_norm else None,
            window=spec.windows[index],
            rope=spec.ropes[index],
        )

    def _norm(self, name: str) -> torch.Tensor:
        weight, offset = self._tensor(name), self._spec.norm_offset
        return weight.float() + offset if offset else weight

    def _mlp(self, names: LayerTensors) -> FusedMlp:
        has_bias = self._spec.has_mlp_bias
        return FusedMlp(self._merge(names.gate_up, has_bias=has_bias), self._merge((names.down,), has_bias=has_bias))

    def _experts(self, names: LayerTensors) -> FusedExperts:
        spec = self._spec
        router = self._plain(self._tensor(names.router), None)
        gate_up = self._concatenate([name for expert in names.experts for name in expert.gate_up])
        down = self._concatenate([expert.down for expert in names.experts])
        return FusedExperts(
            spec,
            router,
            gate_up.view(spec.num_experts, -1, spec.hidden_size),
            down.view(spec.num_experts, -1, spec.expert_size),
            self._format.is_invariant,
        )

    def _merge(self, names: tuple[str, ...], *, has_bias: bool) -> Projection:
        bias = self._concatenate([bias_of(name) for name in names]) if has_bias else None
        if not self._format.is_fp8:
            return self._plain(self._concatenate(names), bias)
        # Matrix by matrix, so that at most one of them is held unquantized at a time.
        parts = []
        for name in names:
            parts.append(Fp8Projection.quantize(self._checkpoint[name].to(self._device)))
            self._count()
        return Fp8Projection.merge(parts, bias, self._format.dtype)

    def _plain(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PlainProjection:
        return PlainProjection(weight, bias, invariant_linear if self._format.is_invariant else F.linear)

    def _concatenate(self, names: Sequence[str]) -> torch.Tensor:
        """Load the named tensors, stacked along their first axis."""
        shapes = [self._shapes[name] for name in names]
        rows = [shape[0] for shape in shapes]
        merged = torch.empty(sum(rows), *shapes[0][1:], dtype=self._format.dtype, device=self._device)
        for name, place in zip(names, torch.split(merged, rows), strict=True):
            place.copy_(self._checkpoint[name])
            self._views[name] = place
            self._count()
        return merged

    def _tensor(self, name: str) -> torch.Tensor:
        return self._concatenate([name])

    def _count(self) -> None:
        self._done += 1
        self._progress(self._done, self._total)
