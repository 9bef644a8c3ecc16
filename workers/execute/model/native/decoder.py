"""The compiled decoder as a function of a step: combines weights, rotary tables, pages and states."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .....protocol.arrays import Float32, Int32, Int64
from .....protocol.errors import ConfigError
from ...kernels.memory import Arena, MakeArena, padded
from ...kernels.structures import Layer, Model, Sharing, Step
from ...step import StepInputs
from ..threads import THRESHOLDS, Thresholds
from .lora import PackedAdapters
from .states import NativeStates
from .weights import PackedWeights


class NativeOutputs(NamedTuple):
    """Outputs for the R logit rows and the E embedded rows of a step. Later steps reuse the arrays."""

    logits: Float32  # [R, V]; if only the greatest was asked for, others may be anything below it
    tokens: Int32  # [R], index of the greatest logit, the first one if tied
    greatest: Float32  # [R], that logit; NaN if any logit of the row is NaN
    hidden: Float32  # [E, hidden_size], after the last norm


class _Room:
    """Buffers for the outputs of a step."""

    def __init__(self, width: int, hidden_width: int) -> None:
        self._width, self._hidden_width = width, hidden_width  # of rows of logits and of hidden states
        self.hidden = np.empty((0, hidden_width), np.float32)
        self._allocate(1)

    def reserve(self, num_rows: int, num_hidden: int = 0) -> None:
        if num_rows > len(self.tokens):
            self._allocate(num_rows)
        if num_hidden > len(self.hidden):
            self.hidden = np.empty((num_hidden, self._hidden_width), np.float32)
            self.addresses["hidden"] = self.hidden.ctypes.data

    def _allocate(self, num_rows: int) -> None:
        self.logits = np.empty((num_rows, self._width), np.float32)
        self.tokens = np.zeros(num_rows, np.int32)
        self.greatest = np.empty(num_rows, np.float32)
        outputs = {
            "logits": self.logits, "tokens": self.tokens, "greatest": self.greatest, "hidden": self.hidden
        }  # fmt: skip
        self.addresses = {name: output.ctypes.data for name, output in outputs.items()}


class _Submitted(NamedTuple):
    room: _Room
    num_rows: int  # of logits
    num_hidden: int
    order: Int64 | None  # permutation of its rows of logits as passed to the kernels; None: unchanged
    arrays: list[Int32]  # kept alive while the kernels use them


class NativeDecoder:
    """Owns its KV pool. At most two steps are in flight; they are computed in order by the decoder's own threads and by
    the thread that waits.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: PackedWeights,
        ropes: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        num_pages: int,
        page_size: int,
        num_state_rows: int = 0,
        num_threads: int,
        eight_bit_pages: bool = False,
        overlaps: bool = False,
        thresholds: Thresholds = THRESHOLDS,
        adapters: PackedAdapters | None = None,
        make_arena: MakeArena = Arena,
    ) -> None:
        """``ropes`` are the tables of the model's rotary embeddings. ``num_threads`` threads compute at a time. With
        ``overlaps``, steps run while no caller waits for them. Keys and values are stored as computed, or in eight
        bits. Recurrent layers have ``num_state_rows`` rows of states. Pages are in the memory of ``make_arena``.
        """
        self._library = library
        self._weights = weights
        self._vocab_size = weights.spec.vocab_size
        self._layers = (Layer * len(weights.layers))(*weights.layers)
        self._ropes = [[np.ascontiguousarray(table.numpy(), np.float32) for table in rope] for rope in ropes]
        for layer, number in zip(self._layers, weights.spec.ropes, strict=True):
            if number is not None:
                layer.cosines, layer.sines = (table.ctypes.data for table in self._ropes[number])
        self.pools = self._allocate_pages(num_pages, page_size, make_arena, has_eight_bits=eight_bit_pages)
        is_recurrent = any(weights.spec.is_recurrent)
        self._states = NativeStates(weights.spec, self._layers, num_state_rows) if is_recurrent else None
        model = Model.from_buffer_copy(weights.model)
        model.eight_bit_pages = eight_bit_pages
        model.layers = ctypes.addressof(self._layers)
        model.page_size = page_size
        self._model, self.overlaps = model, overlaps
        self._num_tokens = 0  # that there is memory for
        self._progress_word: Int64 | None = None
        self._sharing = Sharing(*thresholds, num_threads=num_threads, num_own=max(num_threads - 1, int(overlaps)))
        self._start(adapters or PackedAdapters([]))
        self._hidden_scaling = np.float32(weights.spec.logits_scaling)  # by which the last norm divides them
        self._hidden_size, self.num_layers = weights.spec.hidden_size, weights.spec.num_layers
        self._rooms = [_Room(padded(self._vocab_size), padded(self._hidden_size)) for _ in range(2)]
        self._submitted: deque[_Submitted] = deque()  # not waited for yet

    def _start(self, adapters: PackedAdapters) -> None:
        """Make the kernels' own decoder, with these adapters, and start its threads."""
        self._model.updates = ctypes.addressof(adapters.updates) if adapters.updates else None
        self._model.max_rank, self._model.adapted_products = adapters.max_rank, adapters.adapted_products
        self._decoder = self._library.triptych_decoder_new(self._model, self._sharing)
        if not self._decoder:
            raise ConfigError(f"cannot start {self._sharing.num_threads} threads", param="threads")
        self._end = weakref.finalize(self, self._library.triptych_decoder_delete, self._decoder)
        self.adapters = adapters

    def adapt(self, adapters: PackedAdapters) -> None:
        """Replace the adapters; pages, states and weights stay. No step may be in flight.

        Raises:
            ConfigError: its threads cannot be started, and there is no decoder any more.
            MemoryError: there is not enough memory.
        """
        self._end()
        self._start(adapters)
        if self._num_tokens:
            self._reserve(self._num_tokens)
        if self._progress_word is not None:
            self.show_progress(self._progress_word)

    def reserve(self, *, num_tokens: int, num_rows: int) -> None:
        """Allocate memory for steps of ``num_tokens`` tokens and ``num_rows`` logit rows. No step may be in flight.

        Raises:
            MemoryError: there is not enough memory.
        """
        for room in self._rooms:
            room.reserve(num_rows)
        self._reserve(num_tokens)

    def _reserve(self, num_tokens: int) -> None:
        if self._library.triptych_decoder_reserve(self._decoder, num_tokens):
            raise MemoryError(f"no memory for a step of {num_tokens} tokens")
        self._num_tokens = num_tokens

    def show_progress(self, word: Int64) -> None:
        """See ``Runner.show_progress``: several times in each layer."""
        self._progress_word = word  # kept alive
        self._library.triptych_decoder_show_progress(self._decoder, word.ctypes.data)

    def run(self, inputs: StepInputs, *, choices: Int32 | None = None) -> NativeOutputs:
        """Compute a step. It must be the only one in flight.

        ``choices`` [tokens, layers, experts per token] receives the experts that were chosen, in layers that have any.

        Raises:
            MemoryError: there is not enough memory for a step of this size.
        """
        self.submit(inputs, choices=choices)
        return self.wait()

    def submit(self, inputs: StepInputs, *, choices: Int32 | None = None, only_greatest: bool = False) -> bool:
        """Queue a step after the one in flight. Carried tokens are taken from the previous step. With
        ``only_greatest``, no other logits are needed.

        Returns whether it pays to submit another step before waiting for this one. It does not if this step is so small
        that the waiting thread computes it itself rather than wake another, nor if it is very long.
        """
        assert len(self._submitted) < len(self._rooms), f"{len(self._submitted)} steps are under way"
        rows, embedded_rows = inputs.logit_rows, inputs.embedded_rows
        # The kernels require ascending rows. Sampled rows are ascending, but scored rows lie between them.
        order = np.argsort(rows) if inputs.scored else None
        last = self._submitted[-1].room if self._submitted else None
        room = self._rooms[last is self._rooms[0]]
        room.reserve(len(rows), len(embedded_rows))
        states = self._states.begin_step(inputs) if self._states else {}
        ascending = [rows if order is None else rows[order], embedded_rows]
        packed, addresses = _packed(inputs, np.concatenate(ascending), states)
        step = Step(
            num_tokens=len(inputs.token_ids),
            num_sequences=len(inputs.context_lens),
            num_rows=len(rows) + len(embedded_rows),
            num_hidden=len(embedded_rows),
            table_width=inputs.block_tables.shape[1],
            vocab_size=self._vocab_size,
            only_greatest=only_greatest,
            **addresses,
            **room.addresses,
        )
        arrays = [packed]
        if choices is not None:
            arrays.append(choices)
            step.choices = choices.ctypes.data
        if inputs.carried is not None:
            assert last is not None, "the tokens of the previous step are needed, and there is none"
            arrays.append(last.tokens)
            step.last_tokens = last.addresses["tokens"]
        self._submitted.append(_Submitted(room, len(rows), len(embedded_rows), order, arrays))
        return bool(self._library.triptych_decoder_submit(self._decoder, step))

    def wait(self) -> NativeOutputs:
        """Return the outputs of the oldest step that was not waited for yet.

        Raises:
            MemoryError: there was not enough memory for a step of this size.
        """
        assert self._submitted, "no step is under way"
        has_failed = self._library.triptych_decoder_wait(self._decoder)
        room, count, num_hidden, order, _ = self._submitted.popleft()
        if has_failed:
            raise MemoryError(f"no memory for a step with {count} rows of logits")
        logits, tokens, greatest = room.logits[:count, : self._vocab_size], room.tokens[:count], room.greatest[:count]
        hidden = room.hidden[:num_hidden, : self._hidden_size] * self._hidden_scaling
        if order is None:
            return NativeOutputs(logits, tokens, greatest, hidden)
        asked = np.argsort(order)
        return NativeOutputs(logits[asked], tokens[asked], greatest[asked], hidden)

    def _allocate_pages(
        self, num_pages: int, page_size: int, make_arena: MakeArena, *, has_eight_bits: bool
    ) -> list[npt.NDArray[np.uint8]]:
        """Keys and values of every attention layer, bytes [num_pages + 1, bytes per page], the trash page first.

        For the layout of a page see ``src/pages.h``.
        """
        spec = self._weights.spec
        cells = self._weights.format.cache_bytes(spec.head_dim, spec.value_dim, has_eight_bits=has_eight_bits)
        sizes = [spec.num_kv_heads * page_size * cell * (num_pages + 1) for cell in cells] * spec.num_attending
        try:
            arena = make_arena(sum(padded(size) for size in sizes))
        except (OSError, ValueError) as error:
            size = sum(sizes) / (1 << 30)
            raise ConfigError(f"{num_pages} pages take {size:.2f} GiB, too much", param="num_pages") from error
        pools = [arena.take(size).reshape(num_pages + 1, -1) for size in sizes]
        attending = compress(self._layers, spec.attends)
        for layer, keys, values in zip(attending, pools[::2], pools[1::2], strict=True):
            layer.keys, layer.values = keys.ctypes.data, values.ctypes.data
        return pools


def _packed(inputs: StepInputs, rows: Int32, others: dict[str, Int32]) -> tuple[Int32, dict[str, int]]:
    """Concatenate the arrays of a step and ``others``; also returns their addresses by field names of ``Step``."""
    arrays = {
        "slot_mapping": np.ascontiguousarray(inputs.slot_mapping, np.int64).view(np.int32),  # first, for its alignment
        "token_ids": inputs.token_ids,
        "positions": inputs.positions,
        "query_starts": inputs.query_starts,
        "context_lens": inputs.context_lens,
        "block_tables": inputs.block_tables.ravel(),
        "wanted_rows": rows,
        **others,
    }
    if inputs.carried is not None:
        arrays["carried"] = inputs.carried
    if (adapters := inputs.token_adapters) is not None:
        arrays["adapters"] = adapters - np.int32(1)
    packed = np.concatenate(list(arrays.values()), dtype=np.int32, casting="same_kind")
    ends = accumulate((4 * array.size for array in arrays.values()), initial=packed.ctypes.data)
    return packed, dict(zip(arrays, ends, strict=False))
