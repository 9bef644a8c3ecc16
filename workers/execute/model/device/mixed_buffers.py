"""Device buffers for steps that contain prompts, or proposals, and run as graphs.

Axes: D rows of decodes, C tokens of chunks of prompts, S chunks, P pages of a block table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...attention.device_step import DeviceStep, columns_of
from ...step import StepInputs
from .buckets import StepSize
from .buffers import HostStage

_COLUMNS = 5  # of a token: token id, position, slot, carried row, adapter


class MixedBuffers:
    """The static buffers that graphs of mixed steps read, for steps of any of these sizes.

    First come the decodes, padded as in ``DecodeBuffers``, then the tokens of chunks. Tokens beyond the step's own are
    one more chunk, which attends to nothing and writes to the trash page. Other chunks beyond the step's own are empty.
    In a step with proposals, decodes are chunks too.
    """

    def __init__(self, sizes: Sequence[StepSize], max_pages: int, *, device: torch.device) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        # As in ``DecodeBuffers``, one copy transfers the columns and the block tables.
        self._inputs = ints(max(sum(_lengths(size)) + size.num_seqs * max_pages for size in sizes))
        self._tables = ints(max(size.num_seqs for size in sizes), max_pages)
        self._stage = HostStage(device, torch.int32)

    def step(self, size: StepSize, *, is_adapted: bool = False) -> DeviceStep:
        """Return the buffers as a step of this size."""
        lengths = _lengths(size)
        columns = torch.split(self._inputs[: sum(lengths)], lengths)
        token_ids, positions, slots, carried, adapters, starts, contexts, logit_rows = columns
        return DeviceStep(
            token_ids, positions, slots, carried, starts, contexts, logit_rows, self._tables[: size.num_seqs],
            num_decodes=size.num_rows, max_query_len=size.max_chunk_len,
            adapters=adapters if is_adapted else None,
        )  # fmt: skip

    def fill(self, inputs: StepInputs, size: StepSize) -> None:
        """Write a step to the buffers of this size, which holds it."""
        token_ids, positions, slots, carried, starts, contexts, logit_rows, tables, adapters = columns_of(inputs)
        num_decodes = 0 if size.num_checked else inputs.num_decodes
        shift = size.num_rows - num_decodes
        rows = np.zeros((_COLUMNS, size.num_tokens), np.int32)
        rows[3] = -1
        end = shift + len(token_ids)
        for row, column in zip(rows, (token_ids, positions, slots, carried, adapters), strict=True):
            if len(column):
                row[:num_decodes], row[size.num_rows : end] = column[:num_decodes], column[num_decodes:]
        num_seqs = size.num_seqs
        all_starts = np.arange(num_seqs + 1, dtype=np.int32)
        all_starts[size.num_rows :] = end
        all_starts[size.num_rows : shift + len(starts)] = starts[num_decodes:] + shift
        all_starts[-1] = size.num_tokens
        all_contexts = np.zeros(num_seqs, np.int32)
        all_contexts[:num_decodes] = contexts[:num_decodes]
        all_contexts[size.num_rows : shift + len(contexts)] = contexts[num_decodes:]
        sampled = np.zeros(size.num_sampled, np.int32)
        sampled[: len(logit_rows)] = np.where(logit_rows < num_decodes, logit_rows, logit_rows + shift)
        columns = [rows, all_starts, all_contexts, sampled]
        self._stage.copy([*columns, tables], self._inputs)
        flat = self._inputs[sum(column.size for column in columns) :][: tables.size].view(tables.shape)
        width = tables.shape[1]
        self._tables[:num_decodes, :width] = flat[:num_decodes]
        self._tables[size.num_rows : shift + len(tables), :width] = flat[num_decodes:]

    def clear(self, size: StepSize) -> None:
        """Make everything padding, for a graph of this size."""
        self.fill(_nothing(), size)


def _lengths(size: StepSize) -> list[int]:
    """The lengths of what is transferred before the block tables: the columns, and what sequences and samples have."""
    return [*[size.num_tokens] * _COLUMNS, size.num_seqs + 1, size.num_seqs, size.num_sampled]


def _nothing() -> StepInputs:
    none, tables = np.empty(0, np.int32), np.empty((0, 1), np.int32)
    return StepInputs(none, none, none.astype(np.int64), np.zeros(1, np.int32), none, tables, 0, none, ())
