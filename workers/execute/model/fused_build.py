"""From a checkpoint to a fused decoder that is proven to work, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from ..attention.device_step import upload
from ..attention.triton import TritonAttention
from ..step import Int32, StepInputs
from .decoder_spec import DecoderSpec, Unsupported
from .dense_checkpoint import choose_dtype, open_checkpoint, read_facts
from .facts import ModelFacts, Progress
from .fp8 import MULTIPLE
from .fused_decoder import FusedDecoder
from .fused_lora import FusedAdapters
from .fused_weights import Format, FusedLoader, FusedWeights
from .lora import Adapter
from .native_self_test import (
    NUM_PAGES,
    NUM_POSITIONS,
    PAGE_SIZE,
    mapped_model,
    paged_logits,
    plain_logits,
    random_sequences,
)
from .pool import LayerShape, allocate_pool
from .ropes import find_ropes
from .torch_lora import merged

# Greatest difference from the plain forward pass, relative to the greatest logit.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 1e-1}
_FP8_TOLERANCE = 0.5
_FP8_CAPABILITY = (9, 0)  # of the first CUDA devices whose fp8 products have a scale for each row


@dataclass(frozen=True, slots=True)
class FusedModel:
    """Weights that passed the self-test. ``make_decoder(num_pages, max_model_len)`` gives them their pages."""

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
    page_size: int,
    device: torch.device,
    adapters: Sequence[Adapter] = (),
    progress: Progress,
) -> FusedModel:
    """The dense decoder in a local checkpoint directory, on ``device``.

    Raises:
        Unsupported: the kernels do not compute this model, or not here; the text says why.
        ConfigError: the checkpoint is missing something or damaged, or an adapter does not fit it.
    """
    config, checkpoint, spec = open_checkpoint(folder)
    if checkpoint.is_quantised:
        raise Unsupported("its weights have four bits already")
    format_ = _format(config, dtype, quantization, is_invariant)
    _check(spec, format_, device)
    weights = FusedLoader(spec, checkpoint, format_=format_, device=device, progress=progress).load()
    stacked = FusedAdapters(weights, adapters)
    kernel = TritonAttention(device, is_invariant=is_invariant)
    shapes = [LayerShape(spec.num_kv_heads, spec.head_dim, spec.head_dim, format_.dtype)] * spec.num_layers

    def make_decoder(num_pages: int, max_model_len: int, page_size: int = page_size) -> FusedDecoder:
        pool = allocate_pool(dict(enumerate(shapes)), num_pages, page_size=page_size, device=device)
        [rope] = (rope.tables(max_model_len) for rope in find_ropes(config))
        return FusedDecoder(weights, kernel, list(pool.values()), rope=rope, adapters=stacked)

    # Of fp8 there is no copy in the model's type on the device: the mapped files are read instead, by the CPU.
    plain_weights = checkpoint if format_.is_fp8 else weights.views
    model = mapped_model(config, plain_weights, format_.dtype)
    _self_test(make_decoder(NUM_PAGES, NUM_POSITIONS, PAGE_SIZE), weights, model, adapters)
    name = "fp8" if format_.is_fp8 else str(format_.dtype).removeprefix("torch.")
    return FusedModel(
        facts=read_facts(config, folder, tokenizer, checkpoint),
        dtype=format_.dtype,
        backend=f"fused {name}{' deterministic' if is_invariant else ''}",
        shapes=shapes,
        make_decoder=make_decoder,
    )


def _format(config: PretrainedConfig, dtype: str, quantization: str, is_invariant: bool) -> Format:
    found = choose_dtype(config, dtype, _TOLERANCES)
    if quantization not in ("none", "fp8"):
        raise Unsupported(f"quantization is {quantization}, which the fused decoder has not")
    if quantization == "fp8" and is_invariant:
        raise Unsupported("the products of fp8 depend on the batch, which deterministic rules out")
    return Format(found, is_fp8=quantization == "fp8", is_invariant=is_invariant)


def _check(spec: DecoderSpec, format_: Format, device: torch.device) -> None:
    beyond = {
        f"the activation {spec.activation}": spec.activation != "silu",
        "norms of what its layers add": spec.has_post_norms,
        "norms over all heads together": spec.norms_whole_queries,
        "weights of norms that count from 1": spec.norm_offset != 0,
        "a cap of scores or logits": (spec.score_cap, spec.logit_cap) != (None, None),
        "queries that grow with their position": spec.query_growth != 0,
        "experts": any(spec.has_experts),
        "several kinds of rotary positions": len(set(spec.ropes) - {None}) > 1,
    }
    for what, is_there in beyond.items():
        if is_there:
            raise Unsupported(f"it has {what}, which the fused decoder has not")
    if spec.head_dim % 2 or spec.head_dim > 256:
        raise Unsupported(f"its heads have {spec.head_dim} channels, the limits are an even number and 256")
    if not format_.is_fp8:
        return
    sizes = (spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim)
    if any(size % MULTIPLE for size in sizes):
        raise Unsupported(f"fp8 needs sizes that are multiples of {MULTIPLE}, it has {sizes}")
    if device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise Unsupported(f"{torch.cuda.get_device_name(device)} has no products of fp8 with a scale a row")
    if format_.dtype != torch.bfloat16:
        raise Unsupported(f"fp8 multiplies into bfloat16, the dtype is {format_.dtype}")


@torch.inference_mode()
def _self_test(
    decoder: FusedDecoder, weights: FusedWeights, model: PreTrainedModel, adapters: Sequence[Adapter]
) -> None:
    """Run three short sequences in two ragged steps, without an adapter and with each, and compare with transformers.

    Raises:
        Unsupported: the logits differ; the text says by how much.
    """
    sequences = random_sequences(weights.spec.vocab_size)
    limit = _FP8_TOLERANCE if weights.format.is_fp8 else _TOLERANCES[weights.format.dtype]
    for number, adapter in enumerate((None, *adapters)):
        with nullcontext() if adapter is None else merged(model, adapter):
            plain = plain_logits(model, sequences).cpu()
        difference = float((_fused_logits(decoder, sequences, number) - plain).abs().max())
        tolerance = limit * float(plain.abs().max())
        if not difference <= tolerance:  # a not-a-number fails too
            name = "" if adapter is None else f"with the adapter {adapter.name!r} "
            text = f"{name}its logits differ by {difference:.2g} from transformers', the limit is {tolerance:.2g}"
            raise Unsupported(text)


def _fused_logits(decoder: FusedDecoder, sequences: list[Int32], adapter: int) -> torch.Tensor:
    """Logits [tokens, V] of the same sequences, with the adapter of this number, or none: 0."""
    adapters = np.full(len(sequences), adapter, np.int32) if adapter else None

    def run(inputs: StepInputs) -> torch.Tensor:
        step = upload(replace(inputs, adapters=adapters), decoder.device)
        return decoder(step, step.token_ids)

    return paged_logits(run, sequences).cpu()
