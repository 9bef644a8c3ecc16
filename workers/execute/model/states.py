"""The states of recurrent layers, which summarize sequences in rows of fixed size.

Axes: S sequences of a step, G segments of it, N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch

from ....protocol.arrays import Int32
from ....protocol.errors import ConfigError
from ..step import StepCut

_NOBODY = -1

# The rows of the current step that the current recurrent module computes; other modules compute all rows.
rows_in_sight: ContextVar[slice] = ContextVar("triptych_rows_in_sight", default=slice(None))


class StateKey(NamedTuple):
    """One tensor of a sequence's state."""

    module: int  # number, in order, among the recurrent modules of the model
    kind: str  # "conv" or "recurrent"
    which: int  # index, as some modules have several of a kind


class StateShape(NamedTuple):
    """Size and type of such a tensor for one sequence."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


class StateLayout(NamedTuple):
    """Which states the recurrent layers of a model keep."""

    shapes: Mapping[StateKey, StateShape]
    stepwise: frozenset[int]  # modules that can continue from a state only one token at a time

    def num_bytes(self, num_rows: int) -> int:
        """Size of rows 0..num_rows and the row of zeros."""
        return num_stored_rows(num_rows) * sum(shape.num_bytes for shape in self.shapes.values())


Mixer = Callable[[torch.Tensor, Any], torch.Tensor]  # (hidden [S, L, C], a cache like transformers') -> [S, L, ...]


def num_stored_rows(num_rows: int) -> int:
    """Rows in memory: rows 1..num_rows, the trash row before them and the row of zeros behind them."""
    return num_rows + 2


class StateLedger:
    """How many tokens the state in each row 0..N covers.

    Row 0 is the trash row; sequences that begin read row N + 1, which stays zero. A segment reads one row and writes
    another, so a failed step can be repeated, in whole or in parts, like one that only writes to pages.
    """

    def __init__(self, num_rows: int) -> None:
        self._ends = np.full(num_rows + 1, _NOBODY, np.int64)
        self._zeros = num_rows + 1
        self.num_rows = num_stored_rows(num_rows)

    def begin_step(self, cut: StepCut) -> Int32:
        """[G], the row that each segment reads. Counts the step as computed.

        Raises:
            AssertionError: a row does not contain the state from which a segment continues.
        """
        is_fresh = cut.starts == 0
        self._ends[cut.writes] = cut.starts + cut.lengths  # first: segments of one sequence continue from one another
        ends = self._ends[cut.reads]
        is_known = is_fresh | (ends == cut.starts)
        assert is_known.all(), f"no state up to token {cut.starts[~is_known]}: rows {cut.reads} have seen {ends}"
        return np.where(is_fresh, np.int32(self._zeros), cut.reads)


class SequenceStates:
    """The states themselves, for transformers modules."""

    def __init__(self, layout: StateLayout, num_rows: int, device: torch.device) -> None:
        """
        Raises:
            ConfigError: the device does not have enough memory.
        """
        self._device = device
        self._stepwise = layout.stepwise
        self._ledger = StateLedger(num_rows)
        try:
            self._rows = {
                key: torch.empty(self._ledger.num_rows, *shape.sizes, dtype=shape.dtype, device=device)
                for key, shape in layout.shapes.items()
            }
        except RuntimeError as error:  # torch.OutOfMemoryError, and what the CPU allocator raises
            size = layout.num_bytes(num_rows) / (1 << 30)
            raise ConfigError(
                f"{num_rows} states of recurrent layers take {size:.2f} GiB, more than {device} has",
                param="max_num_seqs",
            ) from error
        for rows in self._rows.values():
            rows[-1] = 0  # read by sequences that begin
        self._of_module: dict[int, list[StateKey]] = {}
        for key in layout.shapes:
            self._of_module.setdefault(key.module, []).append(key)
        self._cut: StepCut | None = None
        self._reads = self._writes = torch.empty(0, dtype=torch.int64)

    def begin_step(self, cut: StepCut) -> None:
        """Prepare to compute this step.

        Raises:
            AssertionError: a sequence continues from a state that was not kept.
        """
        self._reads = torch.from_numpy(self._ledger.begin_step(cut)).to(self._device, torch.long)
        self._cut = cut
        self._writes = torch.from_numpy(cut.writes).to(self._device, torch.long)

    def mix(self, number: int, run: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """See ``recurrent.LayerStates``. Computes all decodes together, then each segment separately."""
        cut = self._cut
        assert cut is not None, "begin_step must be called first"
        pieces: list[torch.Tensor] = []
        end = cut.num_decodes
        if end:
            cache = self._load(number, slice(end))
            pieces.append(_run(run, hidden[0, :end, None], cache, slice(end))[:, 0])
            self._store(cache, slice(end))
        for index in range(cut.num_decodes, len(cut.lengths)):
            first, end = end, end + int(cut.lengths[index])
            cache = self._load(number, slice(index, index + 1))
            step = 1 if number in self._stepwise and cut.starts[index] else end - first
            for row in range(first, end, step):
                pieces.append(_run(run, hidden[:, row : row + step], cache, slice(row, row + step))[0])
            self._store(cache, slice(index, index + 1))
        return torch.cat(pieces)[None]

    def _load(self, number: int, which: slice) -> StepCache:
        """Load the states of module ``number`` from before segments ``which`` of the step."""
        reads = self._reads[which]
        return StepCache(number, {key: self._rows[key].index_select(0, reads) for key in self._of_module[number]})

    def _store(self, cache: StepCache, which: slice) -> None:
        for key, states in cache.states.items():
            self._rows[key].index_copy_(0, self._writes[which], states)


def _run(run: Mixer, hidden: torch.Tensor, cache: StepCache, rows: slice) -> torch.Tensor:
    token = rows_in_sight.set(rows)
    try:
        return run(hidden, cache)
    finally:
        rows_in_sight.reset(token)


class StepCache:
    """Stands in for transformers' cache in a module: the states of the sequences that it is computing.

    A sequence without any tokens yet has a state of zeros, which is also the initial state of such a module.
    """

    def __init__(self, number: int, states: dict[StateKey, torch.Tensor]) -> None:
        self._number = number
        self.states = states  # [S, ...]; the module may write to them

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(StateKey(self._number, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(StateKey(self._number, "recurrent", state_idx))

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """Append ``conv_states`` [S, C, L] to the convolution inputs and return them all; the last ones are kept."""
        key = StateKey(self._number, "conv", state_idx)
        known = self.states[key]
        inputs = torch.cat([known, conv_states], dim=-1)
        self.states[key] = inputs[..., -known.shape[-1] :]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        self.states[StateKey(self._number, "recurrent", state_idx)] = recurrent_states
        return recurrent_states
