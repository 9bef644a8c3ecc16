"""Turns a checkpoint into a fused decoder that is proven to work, or says why that is impossible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from .....protocol.arrays import Int32
from ...attention.device_step import upload
from ...step import StepInputs
from ..checkpoint.dense import choose_dtype, open_checkpoint, read_facts
from ..guard.oracle import DecoderOutputs, Oracle, refusing
from ..guard.probe import NUM_PAGES, NUM_POSITIONS, PAGE_SIZE, decoded_again, paged_rows, random_sequences
from ..guard.proof import Proof
from ..guard.tolerances import ROUNDED, TOLERANCES
from ..lora import Adapter
from ..spec.decoder import DecoderSpec
from .build import FusedModel, FusedSetting
from .decoder import FusedDecoder
from .weights import FusedWeights


def load_fused(
    folder: Path, tokenizer: PreTrainedTokenizerFast, *, dtype: str, setting: FusedSetting
) -> tuple[FusedModel, Proof]:
    """Load the dense decoder in a local checkpoint directory to a device, and prove that it works there.

    Raises:
        Unsupported: the kernels cannot compute this model, or not on this device; the text says why.
        ConfigError: the checkpoint is incomplete or damaged, or an adapter does not fit it.
    """
    opened = open_checkpoint(folder)
    config, checkpoint, spec = opened.config, opened.tensors, opened.spec
    compute_dtype = choose_dtype(config, dtype, TOLERANCES)
    model = setting.load(checkpoint, spec, opened.ropes, compute_dtype)
    # With fp8 the device has no copy of the weights in the model's dtype; the CPU reads the mapped files instead.
    oracle = Oracle(config, spec, model.weights.views)
    if model.weights.format.is_fp8:
        oracle = Oracle(config, spec, checkpoint, checkpoint.made(spec.matrices()))
    decoder = model.make_decoder(NUM_PAGES, NUM_POSITIONS, PAGE_SIZE)
    proof = Proof(
        spec=spec,
        ropes=tuple(opened.ropes),
        dtype=str(compute_dtype).removeprefix("torch."),
        facts=read_facts(opened, tokenizer),
        difference=_self_test(decoder, model.weights, oracle, setting.adapters),
    )
    return model, proof


def _self_test(decoder: FusedDecoder, weights: FusedWeights, oracle: Oracle, adapters: Sequence[Adapter]) -> float:
    """Run three short sequences in two ragged steps, and a token alone, without and with each adapter, and compare with
    transformers. Returns the greatest difference, relative to the greatest logit.

    Raises:
        Unsupported: the logits differ, and the text says by how much; or the kernels cannot be compiled or run here.
    """
    format_, sequences = weights.format, random_sequences(weights.spec.vocab_size)
    is_rounded = format_.is_fp8 or decoder.caches[0].scales is not None
    # Such as on a device that lacks resources for a kernel.
    with refusing("they failed at the first run"):
        return oracle.check(
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
