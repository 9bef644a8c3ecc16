"""Builds a fused decoder from weights and a description of their model, which fused/proven.py determines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...attention.triton import TritonAttention
from ..checkpoint.find import check_weights
from ..checkpoint.mapped import Checkpoint
from ..checkpoint.stored_weights import open_tensors
from ..facts import Progress
from ..guard.proof import Proof
from ..lora import Adapter
from ..pool import EIGHT_BIT_PAGES, LayerShape, allocate_pool
from ..spec.decoder import DecoderSpec, Unsupported
from ..spec.ropes import Rope
from .decoder import FusedDecoder
from .fp8 import MULTIPLE
from .lora import FusedAdapters
from .weights import Format, FusedLoader, FusedWeights

_FP8_CAPABILITY = (9, 0)  # CUDA compute capability from which fp8 products take a scale per row


@dataclass(frozen=True, slots=True)
class FusedModel:
    """Weights on a device. ``make_decoder(num_pages, max_model_len, page_size)`` builds a decoder with pages."""

    weights: FusedWeights
    backend: str
    shapes: list[LayerShape]
    make_decoder: Callable[[int, int, int], FusedDecoder]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSetting:
    """How the kernels should run, and where."""

    quantization: str  # "none" or "fp8"
    is_invariant: bool  # whether no result depends on the batch
    has_eight_bit_pages: bool
    device: torch.device
    adapters: Sequence[Adapter] = ()
    progress: Progress

    def load(self, checkpoint: Checkpoint, spec: DecoderSpec, ropes: Sequence[Rope], dtype: torch.dtype) -> FusedModel:
        """Load the dense decoder ``spec`` from its tensors to the device.

        Raises:
            Unsupported: the kernels cannot compute this model, or not on this device; the text says why.
            ConfigError: the weights are damaged, or an adapter does not fit them.
        """
        if checkpoint.quantised_format is not None:
            raise Unsupported("its weights have four bits already")
        format_ = self._format(dtype)
        _check(spec, format_, self.device)
        weights = FusedLoader(spec, checkpoint, format_=format_, device=self.device, progress=self.progress).load()
        stacked = FusedAdapters(weights, self.adapters)
        kernel = TritonAttention(self.device, is_invariant=self.is_invariant)
        kv_dtype = torch.int8 if self.has_eight_bit_pages else format_.dtype
        shapes = [LayerShape(spec.num_kv_heads, spec.head_dim, spec.head_dim, kv_dtype)] * spec.num_layers

        def make_decoder(num_pages: int, max_model_len: int, page_size: int) -> FusedDecoder:
            pool = allocate_pool(dict(enumerate(shapes)), num_pages, page_size=page_size, device=self.device)
            tables = [rope.tables(max_model_len) for rope in ropes]
            return FusedDecoder(weights, kernel, list(pool.values()), ropes=tables, adapters=stacked)

        name = "fp8" if format_.is_fp8 else str(format_.dtype).removeprefix("torch.")
        backend = f"fused {name}{' deterministic' * self.is_invariant}{EIGHT_BIT_PAGES * self.has_eight_bit_pages}"
        return FusedModel(weights, backend, shapes, make_decoder)

    def _format(self, dtype: torch.dtype) -> Format:
        if self.quantization not in ("none", "fp8"):
            raise Unsupported(f"quantization is {self.quantization}, which the fused decoder does not support")
        if self.quantization == "fp8" and self.is_invariant:
            raise Unsupported("the products of fp8 depend on the batch, which deterministic rules out")
        return Format(dtype, is_fp8=self.quantization == "fp8", is_invariant=self.is_invariant)


def load_proven(folder: Path, proof: Proof, setting: FusedSetting) -> FusedModel:
    """Load a local checkpoint directory whose decoder was proven by an earlier start, on such a device.

    Raises:
        ConfigError: the weights are damaged, or an adapter does not fit them.
    """
    check_weights(folder)
    return setting.load(open_tensors(folder), proof.spec, proof.ropes, getattr(torch, proof.dtype))


def _check(spec: DecoderSpec, format_: Format, device: torch.device) -> None:
    if spec.head_dim % 2 or spec.head_dim > 256:
        raise Unsupported(f"its heads have {spec.head_dim} channels, the limits are an even number and 256")
    if any(spec.is_recurrent):
        raise Unsupported("it has recurrent layers, which the fused decoder does not support")
    if spec.latent is not None:
        raise Unsupported("its heads share latents, which the fused decoder does not support")
    if spec.rotary_dim != spec.head_dim or spec.turns_neighbours or spec.gates_outputs:
        raise Unsupported("it has other rotary positions or gated heads, which the fused decoder does not support")
    if spec.norms_turned_heads:
        raise Unsupported("it norms heads after their rotation, which the fused decoder does not support")
    if spec.has_layer_norms or spec.is_parallel or spec.has_head_bias or not spec.has_gates:
        raise Unsupported("it has layer norms, parallel layers or no gates, which the fused decoder does not support")
    if spec.qkv_limit or spec.activation not in ("silu", "gelu_tanh", "clamped_swiglu"):
        raise Unsupported("it clips queries or has another activation, which the fused decoder does not support")
    if spec.has_sigmoid_routers or spec.has_router_biases:
        raise Unsupported("its routers have sigmoids or biases, which the fused decoder does not support")
    if spec.shared_size:
        raise Unsupported("all tokens share an expert, which the fused decoder does not support")
    if spec.has_sinks:
        raise Unsupported("its heads attend to sinks, which the fused decoder does not support")
    if not format_.is_fp8:
        return
    if any(spec.has_experts):
        raise Unsupported("it has experts, which the fused decoder does not support in fp8")
    sizes = (spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim)
    if any(size % MULTIPLE for size in sizes):
        raise Unsupported(f"fp8 needs sizes that are multiples of {MULTIPLE}, it has {sizes}")
    if device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise Unsupported(f"{torch.cuda.get_device_name(device)} cannot multiply in fp8 with a scale per row")
    if format_.dtype != torch.bfloat16:
        raise Unsupported(f"fp8 multiplies into bfloat16, the dtype is {format_.dtype}")
