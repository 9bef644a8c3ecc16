"""The compiled decoder as a function of a step: weights, positions and pages put together."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ....protocol.errors import ConfigError
from ..kernels.memory import Arena, padded
from ..kernels.structures import Layer, Model, Step
from ..step import Float32, Int32, StepInputs
from .native_weights import PackedWeights


class NativeOutputs(NamedTuple):
    """Of the R rows of a step whose logits are wanted. The arrays are used again by the next step."""

    logits: Float32  # [R, V]
    tokens: Int32  # [R], the first of the greatest logits
    greatest: Float32  # [R], that logit; not a number where any logit is none


class NativeDecoder:
    """Owns its KV pool. ``run`` takes all processors for the time of a step and none in between."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: PackedWeights,
        rope: tuple[torch.Tensor, torch.Tensor],
        *,
        num_pages: int,
        page_size: int,
        num_threads: int,
    ) -> None:
        self._library = library
        self._weights = weights
        self._rope = [np.ascontiguousarray(table.numpy(), np.float32) for table in rope]
        self._vocab_size = weights.spec.vocab_size
        self._layers = (Layer * len(weights.layers))(*weights.layers)
        self.pools = self._allocate_pages(num_pages, page_size)
        model = Model.from_buffer_copy(weights.model)
        model.layers = ctypes.addressof(self._layers)
        model.cosines, model.sines = (table.ctypes.data for table in self._rope)
        model.page_size = page_size
        self._decoder = library.triptych_decoder_new(model, num_threads)
        if not self._decoder:
            raise ConfigError(f"cannot start {num_threads} threads", param="threads")
        weakref.finalize(self, library.triptych_decoder_delete, self._decoder)
        self._step = Step(vocab_size=self._vocab_size)
        self._reserve(1)

    def run(self, inputs: StepInputs) -> NativeOutputs:
        """Computes a step.

        Raises:
            MemoryError: there is not enough for a step of this size.
        """
        rows = inputs.logit_rows
        num_rows = len(rows)
        self._reserve(num_rows)
        step = self._step
        # The kernels want rising rows. Those that are sampled rise, but those that are scored lie among them.
        order = np.argsort(rows) if inputs.scored else None
        arrays = _pointers(inputs, rows if order is None else rows[order])
        for name, array in arrays.items():
            setattr(step, name, array.ctypes.data)
        step.num_tokens = len(inputs.token_ids)
        step.num_sequences = len(inputs.context_lens)
        step.num_rows = num_rows
        step.table_width = inputs.block_tables.shape[1]
        if self._library.triptych_decoder_run(self._decoder, step):
            raise MemoryError(f"no memory for a step of {step.num_tokens} tokens")
        outputs = NativeOutputs(
            self._logits[:num_rows, : self._vocab_size], self._tokens[:num_rows], self._greatest[:num_rows]
        )
        if order is None:
            return outputs
        asked = np.argsort(order)
        return NativeOutputs(outputs.logits[asked], outputs.tokens[asked], outputs.greatest[asked])

    def _reserve(self, num_rows: int) -> None:
        """Room for the outputs of so many rows."""
        if num_rows <= getattr(self, "_num_rows", 0):
            return
        self._num_rows = num_rows
        self._logits = np.empty((num_rows, padded(self._vocab_size)), np.float32)
        self._tokens = np.empty(num_rows, np.int32)
        self._greatest = np.empty(num_rows, np.float32)
        self._step.logits = self._logits.ctypes.data
        self._step.tokens = self._tokens.ctypes.data
        self._step.greatest = self._greatest.ctypes.data

    def _allocate_pages(self, num_pages: int, page_size: int) -> list[npt.NDArray[np.uint8]]:
        """Keys and values of every layer, bytes [num_pages + 1, bytes of a page], the trash page in front.

        Within a page the layout is that of ``src/attention.h``.
        """
        spec = self._weights.spec
        page_bytes = spec.num_kv_heads * spec.head_dim * page_size * self._weights.format.cache_bytes
        num_bytes = page_bytes * (num_pages + 1)
        try:
            arena = Arena(2 * spec.num_layers * padded(num_bytes))
        except (OSError, ValueError) as error:
            size = 2 * spec.num_layers * num_bytes / (1 << 30)
            raise ConfigError(f"{num_pages} pages take {size:.2f} GiB, too much", param="num_pages") from error
        pools = [arena.take(num_bytes).reshape(num_pages + 1, page_bytes) for _ in range(2 * spec.num_layers)]
        for layer, keys, values in zip(self._layers, pools[::2], pools[1::2], strict=True):
            layer.keys, layer.values = keys.ctypes.data, values.ctypes.data
        return pools


def _pointers(inputs: StepInputs, rows: Int32) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a step by the names of ``Step``, contiguous and of its types."""
    return {
        "token_ids": np.ascontiguousarray(inputs.token_ids, np.int32),
        "positions": np.ascontiguousarray(inputs.positions, np.int32),
        "slot_mapping": np.ascontiguousarray(inputs.slot_mapping, np.int64),
        "query_starts": np.ascontiguousarray(inputs.query_starts, np.int32),
        "context_lens": np.ascontiguousarray(inputs.context_lens, np.int32),
        "block_tables": np.ascontiguousarray(inputs.block_tables, np.int32),
        "sample_rows": np.ascontiguousarray(rows, np.int32),
    }
