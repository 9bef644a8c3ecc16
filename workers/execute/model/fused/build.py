"""Builds a proven fused decoder from a checkpoint, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from .....protocol.arrays import Int32
from ...attention.device_step import upload
from ...attention.triton import TritonAttention
from ...step import StepInputs
from ..checkpoint.dense import choose_dtype, open_checkpoint, read_facts
from ..facts import ModelFacts, Progress
from ..guard.oracle import DecoderOutputs, Oracle, refusing
from ..guard.probe import NUM_PAGES, NUM_POSITIONS, PAGE_SIZE, decoded_again, paged_rows, random_sequences
from ..guard.tolerances import ROUNDED, TOLERANCES
from ..lora import Adapter
from ..pool import EIGHT_BIT_PAGES, LayerShape, allocate_pool
from ..spec.decoder import DecoderSpec, Unsupported
from .decoder import FusedDecoder
from .fp8 import MULTIPLE
from .lora import FusedAdapters
from .weights import Format, FusedLoader, FusedWeights

_FP8_CAPABILITY = (9, 0)  # CUDA compute capability from which fp8 products take a scale per row


@dataclass(frozen=True, slots=True)
class FusedModel:
    """Weights that passed the self-test. ``make_decoder(num_pages, max_model_len)`` builds a decoder with pages."""

    facts: ModelFacts
    dtype: torch.dtype
    backend: str
    shapes: list[LayerShape]
    make_decoder: Callable[[int, int], FusedDecoder]


def load_fused(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    dtype: str,
    quantization: str,
    is_invariant: bool,
    has_eight_bit_pages: bool = False,
    page_size: int,
    device: torch.device,
    adapters: Sequence[Adapter] = (),
    progress: Progress,
    is_proven: bool = False,
) -> FusedModel:
    """Load the dense decoder in a local checkpoint directory to ``device``. If ``is_proven``, it has passed the
    self-test there before.

    Raises:
        Unsupported: the kernels cannot compute this model, or not on this device; the text says why.
        ConfigError: the checkpoint is incomplete or damaged, or an adapter does not fit it.
    """
    opened = open_checkpoint(folder)
    config, checkpoint, spec = opened.config, opened.tensors, opened.spec
    if checkpoint.quantised_format is not None:
        raise Unsupported("its weights have four bits already")
    format_ = _format(config, dtype, quantization, is_invariant)
    _check(spec, format_, device)
    weights = FusedLoader(spec, checkpoint, format_=format_, device=device, progress=progress).load()
    stacked = FusedAdapters(weights, adapters)
    kernel = TritonAttention(device, is_invariant=is_invariant)
    kv_dtype = torch.int8 if has_eight_bit_pages else format_.dtype
    shapes = [LayerShape(spec.num_kv_heads, spec.head_dim, spec.head_dim, kv_dtype)] * spec.num_layers

    def make_decoder(num_pages: int, max_model_len: int, page_size: int = page_size) -> FusedDecoder:
        pool = allocate_pool(dict(enumerate(shapes)), num_pages, page_size=page_size, device=device)
        ropes = [rope.tables(max_model_len) for rope in opened.ropes]
        return FusedDecoder(weights, kernel, list(pool.values()), ropes=ropes, adapters=stacked)

    if not is_proven:
        # With fp8 the device has no copy of the weights in the model's dtype; the CPU reads the mapped files instead.
        oracle = Oracle(config, spec, weights.views)
        if format_.is_fp8:
            oracle = Oracle(config, spec, checkpoint, checkpoint.made(spec.matrices()))
        _self_test(make_decoder(NUM_PAGES, NUM_POSITIONS, PAGE_SIZE), weights, oracle, adapters)
    name = "fp8" if format_.is_fp8 else str(format_.dtype).removeprefix("torch.")
    return FusedModel(
        facts=read_facts(opened, tokenizer),
        dtype=format_.dtype,
        backend=f"fused {name}{' deterministic' * is_invariant}{EIGHT_BIT_PAGES * has_eight_bit_pages}",
        shapes=shapes,
        make_decoder=make_decoder,
    )


def _format(config: PretrainedConfig, dtype: str, quantization: str, is_invariant: bool) -> Format:
    found = choose_dtype(config, dtype, TOLERANCES)
    if quantization not in ("none", "fp8"):
        raise Unsupported(f"quantization is {quantization}, which the fused decoder does not support")
    if quantization == "fp8" and is_invariant:
        raise Unsupported("the products of fp8 depend on the batch, which deterministic rules out")
    return Format(found, is_fp8=quantization == "fp8", is_invariant=is_invariant)


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


def _self_test(decoder: FusedDecoder, weights: FusedWeights, oracle: Oracle, adapters: Sequence[Adapter]) -> None:
    """Run three short sequences in two ragged steps, and a token alone, without and with each adapter, and compare with
    transformers.

    Raises:
        Unsupported: the logits differ, and the text says by how much; or the kernels cannot be compiled or run here.
    """
    format_, sequences = weights.format, random_sequences(weights.spec.vocab_size)
    is_rounded = format_.is_fp8 or decoder.caches[0].scales is not None
    # Such as on a device that lacks resources for a kernel.
    with refusing("they failed at the first run"):
        oracle.check(
            lambda number: _outputs_of(decoder, weights.spec, sequences, number),
            sequences,
            adapters,
            dtype=format_.dtype,
            limit=ROUNDED if is_rounded else TOLERANCES[format_.dtype],
            may_round=not is_rounded,
        )


@torch.inference_mode()
def _outputs_of(decoder: FusedDecoder, spec: DecoderSpec, sequences: list[Int32], adapter: int) -> DecoderOutputs:
    num_choices = spec.num_layers * spec.experts_per_token

    def run(inputs: StepInputs) -> torch.Tensor:
        adapters = np.full(len(inputs.context_lens), adapter, np.int32) if adapter else None
        step = upload(replace(inputs, adapters=adapters), decoder.device)
        chosen: list[torch.Tensor] = []
        logits = decoder(step, step.token_ids, choices=chosen)
        rest = iter(chosen)
        nobody = logits.new_zeros(len(logits), spec.experts_per_token)
        # Appended to the logits, so that both are put into token order in the same way.
        return torch.cat([logits, *(next(rest) if has_experts else nobody for has_experts in spec.has_experts)], dim=1)

    rows = decoded_again(run, sequences, paged_rows(run, sequences))
    logits, choices = torch.split(rows, [spec.vocab_size, num_choices], dim=1)
    return DecoderOutputs(logits, choices.view(len(choices), spec.num_layers, spec.experts_per_token))
