"""What recurrent layers of the compiled decoder keep per sequence: states and inputs of convolutions, in float32."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

import numpy as np

from .....protocol.arrays import Int32
from .....protocol.errors import ConfigError
from ...kernels.memory import Arena, padded
from ...kernels.structures import Layer
from ...step import StepInputs
from ..spec.decoder import DecoderSpec
from ..states import StateLedger, num_stored_rows


def state_bytes(spec: DecoderSpec, *, num_rows: int) -> int:
    """Size of rows 0..num_rows and the row of zeros, in all recurrent layers."""
    return sum(spec.is_recurrent) * num_stored_rows(num_rows) * 4 * sum(spec.state_sizes)


class NativeStates:
    """Rows of states, see ``StateLedger``. The layers hold addresses into this memory."""

    def __init__(self, spec: DecoderSpec, layers: Iterable[Layer], num_rows: int) -> None:
        """
        Raises:
            ConfigError: there is not enough memory.
        """
        self._ledger = StateLedger(num_rows)
        sizes = [4 * self._ledger.num_rows * size for size in spec.state_sizes]
        num_bytes = sum(spec.is_recurrent) * sum(map(padded, sizes))
        try:
            self._arena = Arena(num_bytes)
        except (OSError, ValueError) as error:
            size = num_bytes / (1 << 30)
            raise ConfigError(
                f"{num_rows} states of recurrent layers take {size:.2f} GiB, too much", param="max_num_seqs"
            ) from error
        for layer in compress(layers, spec.is_recurrent):
            states, inputs = (self._arena.take(size).ctypes.data for size in sizes)
            layer.delta.states = layer.space.states = states
            layer.delta.inputs = layer.convolution.inputs = layer.space.inputs = inputs

    def begin_step(self, inputs: StepInputs) -> dict[str, Int32]:
        """The segments of a step and their rows, by field names of ``Step``.

        Raises:
            AssertionError: a row does not contain the state from which a segment continues.
        """
        cut = inputs.cut
        assert cut is not None, "a step of a model with states has a cut"
        reads, ends = self._ledger.begin_step(cut), np.cumsum(cut.lengths, dtype=np.int32)
        starts = np.searchsorted(ends, inputs.query_starts, side="right").astype(np.int32)
        return {
            "segment_starts": starts,
            "segment_ends": ends - np.repeat(inputs.query_starts[:-1], np.diff(starts)),
            "state_reads": reads[starts[:-1]],
            "state_writes": cut.writes,
        }
