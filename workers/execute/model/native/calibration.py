"""How much the inputs of each matrix matter when it is rounded to four bits: from what the model itself writes.

The error of an output is the sum of the errors of its weights, each times its input. If the errors of weights are
independent, its mean square is the sum of their squares, each times the mean square of that input. A few hundred tokens
are enough to know these sizes, which differ by orders of magnitude between the channels of a trained model.

The model writes with the weights that come nearest to those of the checkpoint, in the layout of the kernels, so no
second copy of the weights is needed, and the sizes are those of inputs as the kernels round them.

Sources: Lin et al. 2024, "AWQ", arXiv 2306.00978: the inputs decide which weights matter; Liu et al. 2023, "LLM-QAT",
arXiv 2305.17888: text that the model writes is as good as its training data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from .....protocol.arrays import Float32, Int32
from ...scheduling.states import Segment
from ...step import StepCut, StepInputs
from ..facts import Progress
from ..spec.decoder import DecoderSpec
from ..spec.ropes import Rope
from .decoder import NativeDecoder
from .weights import PackedWeights

Importance = Mapping[str, Float32]  # [num_inputs] by the name of the first weight of a matrix

NUM_STEPS = 32  # in each of which every sequence gets a token
_NUM_SEQUENCES = 16
_PAGE_SIZE = 16
_SEED = 0
_TOKENS_ASSUMED = 4.0  # of inputs that are all of the same size, so that no weight may be rounded to anything


def calibrate(
    library: ctypes.CDLL, weights: PackedWeights, ropes: Sequence[Rope], *, num_threads: int, progress: Progress
) -> Importance:
    """Let the model write, and return the mean squares of the inputs of its matrices in four bits, each divided by the
    mean of its matrix.

    ``weights`` must observe inputs. The number of threads does not matter. ``progress`` gets (done, total) steps.

    Raises:
        ConfigError: there is too little memory.
    """
    spec = weights.spec
    num_steps = min(NUM_STEPS, spec.num_positions or NUM_STEPS)
    decoder = NativeDecoder(
        library,
        weights,
        [rope.tables(num_steps) for rope in ropes],
        num_pages=_NUM_SEQUENCES * _pages_of(num_steps),
        page_size=_PAGE_SIZE,
        num_state_rows=2 * _NUM_SEQUENCES,
        num_threads=num_threads,
    )
    generator = np.random.default_rng(_SEED)
    tokens = generator.integers(0, spec.vocab_size, _NUM_SEQUENCES, dtype=np.int32)
    for position in range(num_steps):
        outputs = decoder.run(_step(tokens, position, num_pages=_pages_of(num_steps)))
        tokens = _drawn(outputs.logits, generator.random(_NUM_SEQUENCES))
        progress(position + 1, num_steps)
    return _importance(spec, weights.squares, _NUM_SEQUENCES * num_steps)


def _pages_of(num_steps: int) -> int:
    return -(-num_steps // _PAGE_SIZE)


def _step(tokens: Int32, position: int, *, num_pages: int) -> StepInputs:
    """The decode of one token of each sequence. A sequence has its pages in a row, and two rows of states in turns."""
    count = len(tokens)
    tables = np.arange(1, count * num_pages + 1, dtype=np.int32).reshape(count, num_pages)
    rows = 1 + np.arange(count) + (position % 2) * count, 1 + np.arange(count) + (1 - position % 2) * count
    segments = [Segment(int(read), int(write), position, 1) for read, write in zip(*rows, strict=True)]
    return StepInputs(
        token_ids=tokens,
        positions=np.full(count, position, np.int32),
        slot_mapping=tables[:, position // _PAGE_SIZE].astype(np.int64) * _PAGE_SIZE + position % _PAGE_SIZE,
        query_starts=np.arange(count + 1, dtype=np.int32),
        context_lens=np.full(count, position + 1, np.int32),
        block_tables=tables,
        num_decodes=count,
        sample_rows=np.arange(count, dtype=np.int32),
        sampled=(),
        cut=StepCut.of(segments, num_decodes=count),
    )


def _drawn(logits: Float32, numbers: npt.NDArray[np.float64]) -> Int32:
    """A token for each row [V], drawn by its probability with one of the ``numbers``, which are from 0 to below 1."""
    with np.errstate(invalid="ignore"):
        sums = np.cumsum(np.exp(logits - logits.max(axis=1, keepdims=True)), axis=1, dtype=np.float64)
        tokens: Int32 = np.sum(sums < numbers[:, None] * sums[:, -1:], axis=1, dtype=np.int32)
    return tokens


def _importance(spec: DecoderSpec, squares: Mapping[str, Float32], num_rows: int) -> Importance:
    """``squares`` are sums over ``num_rows`` tokens."""
    found = {name: _relative(of, of.mean() / num_rows) for name, of in squares.items()}
    for layer in (spec.layer(index).experts for index in range(spec.num_layers)):
        # All experts of a layer read the same rows, so they share the sums of these. The rows inside an expert are its
        # own; only their usual size is taken from all experts.
        ups = [expert.gate_up[0] for expert in layer if expert.gate_up[0] in squares]
        if ups:
            of_all = np.sum([squares[name] for name in ups], axis=0)
            found |= dict.fromkeys(ups, _relative(of_all, of_all.mean() / num_rows))
        downs = [expert.down for expert in layer if expert.down in squares]
        usual = sum(squares[name].mean() for name in downs) / (num_rows * spec.experts_per_token or 1)
        found |= {name: _relative(squares[name], usual) for name in downs}
    return {name: of for name, of in found.items() if np.isfinite(of).all()}


def _relative(squares: Float32, usual: np.floating) -> Float32:
    """The sums of squares [num_inputs] relative to their mean. Some tokens are added whose inputs all have the
    ``usual`` square, so that no input counts as nothing.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        of: Float32 = squares + np.float32(_TOKENS_ASSUMED * usual)
        of /= of.mean()
    return of
