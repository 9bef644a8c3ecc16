"""Paged attention with Triton kernels, for any device that Triton supports. Axes are those of ``interface``."""

from __future__ import annotations

import torch

from ..kernels.sizes import cdiv
from ..kernels.support import num_processors
from ..kernels.triton_chunk import KeySplits, chunk_attention, chunk_tile
from ..kernels.triton_decode import MAX_SPLITS, SHARED_BYTES, decode_attention, decode_tile
from ..kernels.triton_write import write_eight_bits, write_slots
from ..step import StepInputs
from .device_step import DeviceStep, upload
from .hopper import HopperChunks
from .interface import AttentionForm, LayerCache

_PROGRAMS_PER_PROCESSOR = 4  # for decodes: enough loads in flight to keep the memory busy
_CHUNK_PROGRAMS_PER_PROCESSOR = 2  # see ``chunk_tile``
_MIN_SPLIT_KEYS = 256  # below this, a split costs more than it gains
_FIXED_SPLIT_KEYS = 2048  # with ``is_invariant``: to add up its sums costs a large chunk less than a twentieth
_MAX_PARTS_BYTES = 64 << 20  # of what splits yield before it is added up


class TritonAttention:
    """Splits decodes by keys, and chunks into tiles of queries. One object serves all layers of one runner, a step at a
    time.

    With ``is_invariant`` every token goes through the chunk kernel, whose results do not depend, to the bit, on the
    rest of the batch, on chunking, or on whether a token is decoded or part of a chunk.
    """

    def __init__(self, device: torch.device, *, is_invariant: bool = False) -> None:
        self._device = device
        self._is_invariant = is_invariant
        self._num_processors = num_processors(device)
        self._shared_bytes = shared_bytes(device)
        self._hopper = HopperChunks(device, self._num_processors)

    def begin_step(self, inputs: StepInputs) -> None:
        self.use(upload(inputs, self._device))

    def use(self, step: DeviceStep) -> None:
        """Attend for a step that is already on the device."""
        self._step = step

    def write(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        slots = self._step.slot_mapping
        if cache.scales is None:
            write_slots(key, cache.keys, slots)
            write_slots(value, cache.values, slots)
        else:
            write_eight_bits(key, cache.keys, cache.scales, slots, is_key=True)
            write_eight_bits(value, cache.values, cache.scales, slots, is_key=False)

    def attend(self, cache: LayerCache, query: torch.Tensor, form: AttentionForm) -> torch.Tensor:
        step = self._step
        if query.stride(2) != 1:
            query = query.contiguous()
        num_decodes = 0 if self._is_invariant else step.num_decodes
        decoded = self._decode(cache, query[:num_decodes], form)
        if num_decodes == len(step.context_lens):
            return decoded
        output = query.new_empty(*query.shape[:2], cache.values.shape[3])
        output[:num_decodes] = decoded
        self._attend_chunks(cache, query[num_decodes:], output[num_decodes:], form)
        return output

    def _attend_chunks(self, cache: LayerCache, query: torch.Tensor, output: torch.Tensor, form: AttentionForm) -> None:
        """Write the outputs of the last tokens of the step, queries [n, H, D]."""
        step, num_decodes = self._step, len(self._step.token_ids) - len(query)
        tile = chunk_tile(
            max(query.shape[2], cache.values.shape[3]),
            query.dtype,
            shared_bytes=self._shared_bytes,
            has_eight_bits=cache.scales is not None,
        )
        splits = self._key_splits(cache, query, form, tile.num_rows)
        # Where bits must not depend on the batch, one kernel computes all tokens.
        if splits is None and not self._is_invariant and self._hopper.attend(cache, query, output, form, step):
            return
        chunk_attention(
            query,
            cache.keys,
            cache.values,
            output,
            scales=cache.scales,
            block_tables=step.block_tables[num_decodes:],
            context_lens=step.context_lens[num_decodes:],
            query_starts=step.query_starts[num_decodes:],
            scale=form.scale,
            window=form.sliding_window,
            softcap=form.softcap,
            sinks=form.sinks,
            tile=tile,
            splits=splits,
        )

    def _key_splits(
        self, cache: LayerCache, query: torch.Tensor, form: AttentionForm, tile_rows: int
    ) -> KeySplits | None:
        """How to split the keys of chunks. A graph may be replayed with chunks of any lengths, so this depends on what
        is known of all of them; the kernel makes splits of short sequences larger, or leaves them without keys.

        Where bits must not depend on the batch, only who computes the splits does.
        """
        (num_tokens, num_heads, _), (page_size, num_kv_heads, value_dim) = query.shape, cache.values.shape[1:]
        group, num_keys = num_heads // num_kv_heads, self._step.block_tables.shape[1] * page_size
        at_once = _CHUNK_PROGRAMS_PER_PROCESSOR * self._num_processors
        # As few as there can be: more of them with keys cost less than processors without.
        num_tiles = max(cdiv(num_tokens * group, tile_rows), num_tokens // max(1, self._step.max_query_len))
        num_programs = num_tiles * num_kv_heads
        if self._is_invariant:
            num_splits, split_bytes = cdiv(num_keys, _FIXED_SPLIT_KEYS), 4 * num_tokens * num_heads * value_dim
            is_parallel = num_programs < 2 * at_once and num_splits * split_bytes <= _MAX_PARTS_BYTES
            return KeySplits(_FIXED_SPLIT_KEYS, is_parallel) if num_splits > 1 else None
        if form.sliding_window is not None:
            num_keys = min(num_keys, form.sliding_window + cdiv(tile_rows, group))
        num_splits = min(at_once // num_programs, num_keys // _MIN_SPLIT_KEYS)
        return KeySplits(_MIN_SPLIT_KEYS, True, num_splits) if num_splits > 1 else None

    def _decode(self, cache: LayerCache, query: torch.Tensor, form: AttentionForm) -> torch.Tensor:
        step, num_decodes = self._step, len(query)
        num_keys, dim = step.block_tables.shape[1] * cache.keys.shape[1], max(query.shape[2], cache.values.shape[3])
        return decode_attention(
            query,
            cache.keys,
            cache.values,
            scales=cache.scales,
            block_tables=step.block_tables[:num_decodes],
            context_lens=step.context_lens[:num_decodes],
            scale=form.scale,
            window=form.sliding_window,
            softcap=form.softcap,
            sinks=form.sinks,
            num_splits=self._num_splits(
                num_decodes * cache.keys.shape[2], min(num_keys, form.sliding_window or num_keys)
            ),
            tile=decode_tile(
                dim, query.dtype, shared_bytes=self._shared_bytes, has_eight_bits=cache.scales is not None
            ),
        )

    def _num_splits(self, num_programs: int, num_keys: int) -> int:
        """Splits of each sequence's keys, a power of two, so that all processors have work."""
        wanted = _PROGRAMS_PER_PROCESSOR * self._num_processors // max(1, num_programs)
        affordable = min(wanted, num_keys // _MIN_SPLIT_KEYS, MAX_SPLITS)
        return 1 << max(0, affordable.bit_length() - 1)


def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program can have on a GPU."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, "shared_memory_per_block_optin", SHARED_BYTES)  # AMD's devices do not say
