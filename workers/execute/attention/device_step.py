"""A step as a device sees it: the tensors that kernels read, and the few sizes that determine what is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ....protocol.arrays import Float32
from ..step import StepCut, StepInputs


class Taken:
    """The hidden states of some tokens, once a model has left them here."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows  # int64 [E], on the device
        self.states: torch.Tensor | None = None  # [E, channels]

    def to_host(self) -> Float32:
        """float32 [E, channels]."""
        assert self.states is not None, "the model has been computed"
        return self.states.float().cpu().numpy()


class DeviceStep(NamedTuple):
    """``StepInputs`` on the device. Decodes come first. All int32; in a graph all of them are static buffers."""

    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slot_mapping: torch.Tensor  # [T]
    carried: torch.Tensor  # [T], row of this token in the previous step's result, or -1 if it is in token_ids
    query_starts: torch.Tensor  # [S + 1]
    context_lens: torch.Tensor  # [S], 0: a padded row, which attends to nothing
    logit_rows: torch.Tensor  # [R + C], as of ``StepInputs``
    block_tables: torch.Tensor  # [S, P]
    num_decodes: int
    max_query_len: int  # tokens of the longest chunk; 0 without chunks
    adapters: torch.Tensor | None = None  # [T], each token's, counted from 1; 0: none. None: no token has one
    cut: StepCut | None = None  # on the host; for models that keep states
    taken: Taken | None = None  # those whose hidden states are wanted; None: there are none, as in every graph


def columns_of(inputs: StepInputs) -> list[npt.NDArray[Any]]:
    """The arrays of a step in the order of ``DeviceStep``."""
    carried = inputs.carried
    if carried is None:
        carried = np.full(len(inputs.token_ids), -1, np.int32)
    return [
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        carried,
        inputs.query_starts,
        inputs.context_lens,
        inputs.logit_rows,
        inputs.block_tables,
        np.empty(0, np.int32) if (adapters := inputs.token_adapters) is None else adapters,
    ]


def upload(inputs: StepInputs, device: torch.device) -> DeviceStep:
    """A step on the device, copied there directly."""
    tensors = [torch.from_numpy(array.astype(np.int32)).to(device) for array in columns_of(inputs)]
    return as_step(tensors, inputs)


def as_step(tensors: Sequence[torch.Tensor], inputs: StepInputs) -> DeviceStep:
    """The tensors of ``columns_of``, which may be flat, together with the sizes of the step."""
    token_ids, positions, slots, carried, starts, contexts, logit_rows, tables, adapters = tensors
    return DeviceStep(
        token_ids,
        positions,
        slots,
        carried,
        starts,
        contexts,
        logit_rows,
        tables.view(inputs.block_tables.shape),
        num_decodes=inputs.num_decodes,
        max_query_len=longest_chunk(inputs),
        adapters=None if inputs.adapters is None else adapters,
        cut=inputs.cut,
    )


def longest_chunk(inputs: StepInputs) -> int:
    """Tokens of the longest chunk after the decodes, 0 if there is none."""
    lengths = np.diff(inputs.query_starts[inputs.num_decodes :])
    return int(lengths.max()) if len(lengths) else 0
