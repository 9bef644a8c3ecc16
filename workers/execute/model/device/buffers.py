"""Device buffers for a step's inputs, filled by one copy from pinned memory.

Axes: B rows of a decode graph, P pages of a block table.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...attention.device_step import DeviceStep, as_step, columns_of
from ...sampling.device import NUM_COLUMNS
from ...step import StepInputs

_NUM_ALTERNATING = 2  # steps in flight: the host fills one stage while the device may still read the other
_COLUMNS = 6  # of a row: token id, position, slot, carried row, context length, adapter


class HostStage:
    """Lays out the arrays of a step contiguously in pinned memory, and copies them to the device asynchronously.

    A stage is reused two steps later; by then its step has been collected.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._stages = [self._allocate(0) for _ in range(_NUM_ALTERNATING)]
        self._turn = 0

    def copy(self, arrays: Rows[npt.NDArray[np.generic]], target: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the arrays, concatenated, to the device: into ``target`` or into fresh memory."""
        count = sum(array.size for array in arrays)
        self._turn = (self._turn + 1) % _NUM_ALTERNATING
        if len(self._stages[self._turn]) < count:
            self._stages[self._turn] = self._allocate(1 << count.bit_length())
        stage = self._stages[self._turn][:count]
        np.concatenate([array.ravel() for array in arrays], out=stage.numpy(), casting="same_kind")
        if target is None:
            return stage.to(self._device, non_blocking=True, copy=True)
        return target[:count].copy_(stage, non_blocking=True)

    def send(self, arrays: Rows[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Copy arrays of int64, float32 and uint8 to the device, flat, of a stage for int32: no number may need more
        bits. Bytes go four at a time: masks of a large vocabulary are long.
        """
        words = [_words(array.ravel()) for array in arrays]
        parts = torch.split(self.copy(words), [array.size for array in words])
        return [_sent(part, array) for part, array in zip(parts, arrays, strict=True)]

    def _allocate(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=self._dtype, pin_memory=self._device.type == "cuda")


def _words(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array [n], with float32 and uint8 as the int32 that have the same bytes; the last ones may be zeros."""
    if array.dtype == np.uint8:
        array = np.pad(array, (0, -len(array) % 4)) if len(array) % 4 else array
    return array if array.dtype == np.int64 else array.view(np.int32)


def _sent(words: torch.Tensor, array: npt.NDArray[Any]) -> torch.Tensor:
    """The array on the device, given its ``_words`` there: int64, float32 or uint8."""
    if array.dtype == np.int64:
        return words.long()
    return words.view(torch.float32) if array.dtype == np.float32 else words.view(torch.uint8)[: array.size]


def upload_ragged(inputs: StepInputs, stage: HostStage) -> DeviceStep:
    """Upload a step of any shape into fresh device memory."""
    columns = columns_of(inputs)
    return as_step(torch.split(stage.copy(columns), [column.size for column in columns]), inputs)


class DecodeBuffers:
    """The static buffers that decode graphs read: inputs of up to ``max_rows`` rows, and their sampling parameters.

    Rows beyond the step's own are padding: they attend to nothing and write to the trash page.
    """

    def __init__(self, max_rows: int, max_pages: int, *, device: torch.device) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        # The columns of a bucket, see ``_COLUMNS``, are contiguous and followed by the block tables, so that one copy
        # transfers everything. The device then spreads the tables to their fixed width.
        self._inputs = ints(_COLUMNS * max_rows + max_rows * max_pages)
        self._tables = ints(max_rows, max_pages)
        self._indices = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._table = torch.zeros(NUM_COLUMNS * max_rows, dtype=torch.float64, device=device)
        self._stage = HostStage(device, torch.int32)
        self._sampling_stage = HostStage(device, torch.float64)

    def step(self, num_rows: int, *, is_adapted: bool = False) -> DeviceStep:
        """Return the buffers as a step of ``num_rows`` rows."""
        columns = self._inputs[: _COLUMNS * num_rows].view(_COLUMNS, num_rows)
        token_ids, positions, slots, carried, contexts, adapters = columns
        return DeviceStep(
            token_ids, positions, slots, carried,
            query_starts=self._indices[: num_rows + 1], context_lens=contexts, logit_rows=self._indices[:num_rows],
            block_tables=self._tables[:num_rows], num_decodes=num_rows, max_query_len=0,
            adapters=adapters if is_adapted else None,
        )  # fmt: skip

    def sampling_table(self, num_rows: int) -> torch.Tensor:
        """Return the buffer of ``sampling.device.columns`` for ``num_rows`` rows, [5, B]."""
        return self._table[: NUM_COLUMNS * num_rows].view(NUM_COLUMNS, num_rows)

    def fill(self, inputs: StepInputs, num_rows: int) -> None:
        """Write a step of decodes to the buffers of ``num_rows`` rows."""
        token_ids, positions, slots, carried, _, contexts, _, tables, adapters = columns_of(inputs)
        rows = np.zeros((_COLUMNS, num_rows), np.int32)
        rows[3] = -1
        for row, column in zip(rows, (token_ids, positions, slots, carried, contexts, adapters), strict=True):
            row[: len(column)] = column
        self._stage.copy([rows, tables], self._inputs)
        num_seqs, width = tables.shape
        self._tables[:num_seqs, :width] = self._inputs[rows.size :][: tables.size].view(num_seqs, width)

    def clear(self) -> None:
        """Make every row padding, for graphs of any number of rows."""
        self._inputs.zero_()
        self._tables.zero_()

    def fill_sampling(self, table: npt.NDArray[np.float64], num_rows: int) -> None:
        """Write ``sampling.device.columns`` of a step to the buffers of ``num_rows`` rows."""
        padded = np.zeros((NUM_COLUMNS, num_rows))
        padded[:, : table.shape[1]] = table
        self._sampling_stage.copy([padded], self._table)
