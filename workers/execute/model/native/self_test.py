"""The guard of the compiled decoder: it serves only if its logits match transformers' plain forward pass."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PretrainedConfig

from .....protocol.arrays import Int32
from ...kernels.structures import Format
from ...step import StepInputs
from ..checkpoint.mapped import Checkpoint
from ..guard.oracle import DecoderOutputs, Oracle
from ..guard.probe import NUM_PAGES, NUM_POSITIONS, NUM_STATE_ROWS, PAGE_SIZE, paged_rows, random_sequences, whole_rows
from ..guard.tolerances import ROUNDED, TOLERANCES
from ..lora import Adapter
from ..spec.decoder import DecoderSpec, Unsupported
from ..spec.ropes import Rope
from .decoder import NativeDecoder
from .lora import PackedAdapters
from .weights import PackedWeights

# Outputs of a delta rule are normalized. If a head's output is close to zero, for example because key and query are
# orthogonal, the normalized output depends on the last bits, and the token's logits change. So for such models this
# share of tokens may differ from transformers; but all must be bitwise equal to the same tokens computed in one step.
_DELTA_RULE_OUTLIERS = 0.25
# One of the tokens may, where activations have 8 bits: some models have a token with one channel that is hundreds of
# times as large as all others (Sun et al. 2024, "Massive Activations in Large Language Models"). In int4 the other
# channels of its group keep nothing of theirs, which changes what this token says, and hardly the others.
_ROUNDING_OUTLIERS = 0.02
_TOLERANCES = {
    Format.FLOAT32: TOLERANCES[torch.float32],
    Format.BFLOAT16: TOLERANCES[torch.bfloat16],
    **dict.fromkeys((Format.INT8, Format.INT4, Format.MXFP4), ROUNDED),
}


def check_native(
    library: ctypes.CDLL,
    weights: PackedWeights,
    config: PretrainedConfig,
    checkpoint: Checkpoint,
    *,
    ropes: Sequence[Rope],
    num_threads: int,
    packed: PackedAdapters | None = None,
    adapters: Sequence[Adapter] = (),
    eight_bit_pages: bool = False,
) -> float:
    """Run three short sequences in two ragged steps, without an adapter and with each. Returns the greatest
    difference, relative to the greatest logit. The reference uses the dequantised values of quantised weights, but
    unquantised keys and values. ``packed`` are the ``adapters`` in the layout of the kernels.

    Raises:
        Unsupported: the logits differ; the message says by how much.
    """
    decoder = NativeDecoder(
        library,
        weights,
        [rope.tables(NUM_POSITIONS) for rope in ropes],
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        num_state_rows=NUM_STATE_ROWS,
        num_threads=num_threads,
        adapters=packed,
        eight_bit_pages=eight_bit_pages,
    )
    spec, sequences = weights.spec, random_sequences(weights.spec.vocab_size)
    is_exact = weights.format in (Format.FLOAT32, Format.BFLOAT16)
    instead = {**checkpoint.made(spec.matrices()), **weights.quantised()}
    return Oracle(config, spec, checkpoint, instead).check(
        lambda number: _outputs_of(decoder, spec, sequences, number),
        sequences,
        adapters,
        dtype=torch.float32 if weights.format is Format.FLOAT32 else torch.bfloat16,
        limit=_TOLERANCES[Format.INT8 if eight_bit_pages else weights.format],
        may_round=is_exact,
        is_finer=weights.format is Format.BFLOAT16 and not eight_bit_pages,  # it adds up in float32
        outliers=_DELTA_RULE_OUTLIERS if spec.delta is not None else 0.0 if is_exact else _ROUNDING_OUTLIERS,
    )


def _outputs_of(decoder: NativeDecoder, spec: DecoderSpec, sequences: list[Int32], adapter: int) -> DecoderOutputs:
    """
    Raises:
        Unsupported: the outputs of recurrent layers depend on how the tokens are split into steps.
    """
    adapters = np.full(len(sequences), adapter, np.int32) if adapter else None

    def run(inputs: StepInputs) -> torch.Tensor:
        choices = np.zeros((len(inputs.token_ids), spec.num_layers, spec.experts_per_token), np.int32)
        outputs = decoder.run(replace(inputs, adapters=adapters), choices=choices)
        # Appended to the logits, so that they are reordered along with them.
        return torch.from_numpy(np.concatenate([outputs.logits, choices.reshape(len(choices), -1)], axis=1))

    both = paged_rows(run, sequences)
    if any(spec.is_recurrent) and not torch.equal(both, whole_rows(run, sequences)):
        raise Unsupported("its logits change when its tokens are computed in one step")
    shape = (len(both), spec.num_layers, spec.experts_per_token)
    return DecoderOutputs(both[:, : spec.vocab_size].float(), both[:, spec.vocab_size :].reshape(shape))
