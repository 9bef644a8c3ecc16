"""What delta rules of the compiled decoder keep of each sequence: states and inputs of convolutions, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....protocol.errors import ConfigError
from ..kernels.memory import Arena, padded
from ..kernels.structures import Layer
from ..step import Int32, StepInputs
from .delta_spec import DeltaSpec
from .states import StateRows, num_state_rows


def state_bytes(delta: DeltaSpec, *, num_layers: int, num_slots: int) -> int:
    """Of so many sequences, in as many layers as recall."""
    return num_layers * num_state_rows(num_slots) * 4 * sum(delta.state_sizes)


class NativeStates:
    """Rows of states, see ``StateRows``. The layers hold addresses of what lies here."""

    def __init__(self, delta: DeltaSpec, layers: Sequence[Layer], num_slots: int) -> None:
        """
        Raises:
            ConfigError: there is not that much memory.
        """
        self._places = StateRows(num_slots)
        sizes = [4 * self._places.num_rows * size for size in delta.state_sizes]
        num_bytes = len(layers) * sum(map(padded, sizes))
        try:
            self._arena = Arena(num_bytes)
        except (OSError, ValueError) as error:
            size = num_bytes / (1 << 30)
            raise ConfigError(
                f"the states of {num_slots} sequences take {size:.2f} GiB, too much", param="max_num_seqs"
            ) from error
        for layer in layers:
            layer.delta.states, layer.delta.inputs = (self._arena.take(size).ctypes.data for size in sizes)

    def begin_step(self, inputs: StepInputs) -> dict[str, Int32]:
        """Rows with which the sequences of a step begin and end, by the names of ``Step``.

        Raises:
            AssertionError: a sequence goes on from a state that nobody has kept.
        """
        assert inputs.cut is not None, "sequences of a model with states have slots for them"
        reads, writes = self._places.begin_step(inputs.cut)
        return {"state_reads": reads.astype(np.int32), "state_writes": writes.astype(np.int32)}
