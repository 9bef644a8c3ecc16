"""Keys and values in eight bits: the stored bits are right, and attention reads the values they stand for."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.workers.execute.kernels.levels import FASTEST, WHOLE_LEVELS
from tests.workers.execute.model.native.decoders import (
    EVERY_STEP,
    FEW_PAGES,
    PLAIN_FORMATS,
    NativeEngine,
    changed_tensors,
    make_checkpoint,
    make_decoder,
    make_inputs,
    make_request,
    run_chunks,
)
from triptych.protocol.config import CacheConfig
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.kernels.compile import available_levels, compile_options
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.native.decoder import NativeDecoder

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

NUM_PAGES, NUM_TOKENS, CHANNELS = FEW_PAGES, 150, 32
SHAPES: dict[str, dict[str, Any]] = {
    "heads of 16": {},
    "heads of 80": {"head_dim": 80, "hidden_size": 70, "num_attention_heads": 3, "num_key_value_heads": 1},
    "heads of 128, window": {"head_dim": 128, "sliding_window": 70},
    "heads of 32, five share a key": {
        "head_dim": 32, "hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1,
    },
}  # fmt: skip
LATENTS = "latents"
ODD, IN_REGISTERS = "heads of 80", "heads of 128, window"  # the latter is the layout for decodes of few rows
# Between layers, a value rounded to the other side changes by 0.4 % in bfloat16, in eight bits by 0.8 % of the
# greatest beside it.
ROUNDING = {Format.FLOAT32: 1e-5, Format.BFLOAT16: 3e-3, Format.INT8: 2e-2, Format.INT4: 2e-2}
TOKENS = np.random.default_rng(0).integers(0, 77, NUM_TOKENS, dtype=np.int32)


def decoders(checkpoint: Path, level: str, format_: Format) -> tuple[NativeDecoder, NativeDecoder]:
    """Without and with eight bits."""
    options = {"num_pages": NUM_PAGES, "num_threads": 2, "thresholds": EVERY_STEP}
    plain, eight = (make_decoder(checkpoint, level, format_, eight_bit_pages=is_8, **options) for is_8 in (False, True))
    return plain, eight


def run(decoder: NativeDecoder, *sizes: int, token_ids: npt.NDArray[np.int32] = TOKENS) -> Floats:
    """Logits of one sequence in chunks."""
    return run_chunks(decoder, token_ids, sizes)


class Layout:
    """The position of a page's numbers, [heads, tokens, channels]; pages have the height of one tile of 16 tokens."""

    def __init__(self, format_: Format, head_dim: int, level: str) -> None:
        self.group = 1 if format_ is Format.FLOAT32 else 2
        self.element = np.dtype("<f4" if format_ is Format.FLOAT32 else "<u2")
        self.head_dim = head_dim
        # Lookup tables make bfloat16 from sign and magnitude, so the halves of each 16 bytes are 32 numbers apart.
        self.has_tables = self.group == 2 and "-mavx512vbmi" in compile_options(level)

    def num_scales(self, *, is_key: bool) -> int:
        return -(-self.head_dim // CHANNELS) if is_key else 1

    def ordered(self, numbers: npt.NDArray[Any], *, is_key: bool) -> npt.NDArray[Any]:
        """[pages, heads, 16 * channels] as [pages, heads, 16, channels]."""
        shape = (
            (self.head_dim // self.group, 16, self.group) if is_key else (16 // self.group, self.head_dim, self.group)
        )
        tiles = numbers.reshape(*numbers.shape[:2], *shape)
        axes = (0, 1, 3, 2, 4) if is_key else (0, 1, 2, 4, 3)
        return tiles.transpose(axes).reshape(*numbers.shape[:2], 16, self.head_dim)

    def tiles(self, pool: Bytes, *, is_key: bool) -> tuple[Bytes, Bytes]:
        """Bytes of the numbers [pages, heads, 16 * channels] and of the scales of a pool in eight bits, as views."""
        count = 16 * self.head_dim
        tiles = pool.reshape(len(pool), -1, count + 32 * self.num_scales(is_key=is_key))
        return tiles[..., :count], tiles[..., count:]

    def split(self, pool: Bytes, *, is_key: bool) -> tuple[npt.NDArray[np.int8], Floats]:
        """Numbers [pages, heads, 16 * channels] and scales [pages, heads, groups, 16] of a pool in eight bits."""
        stored, stored_scales = self.tiles(pool, is_key=is_key)
        scales = np.ascontiguousarray(stored_scales).view("<u2").astype(np.uint32) << 16
        numbers = stored.view(np.int8)
        if self.has_tables:
            magnitudes = (stored & 0x7F).astype(np.int8)
            numbers = np.where(stored & 0x80, -magnitudes, magnitudes)
            numbers = numbers.reshape(*stored.shape[:2], -1, 4, 2, 8).swapaxes(3, 4).reshape(stored.shape)
        return numbers, scales.view(np.float32).reshape(*stored.shape[:2], -1, 16)

    def spread(self, scales: Floats, *, is_key: bool) -> Floats:
        """The scale of each number, at the number's position."""
        places = np.broadcast_to(np.arange(16 * self.head_dim), (1, 1, 16 * self.head_dim))
        tokens, channels = np.divmod(np.arange(16 * self.head_dim), self.head_dim)
        order = self.ordered(places, is_key=is_key).ravel()
        spread = np.empty((*scales.shape[:2], 16 * self.head_dim), np.float32)
        spread[..., order] = scales[..., channels // CHANNELS if is_key else 0, tokens]
        return spread

    def elements(self, pool: Bytes, *, is_key: bool) -> Bytes:
        """A pool in eight bits, converted to full elements."""
        numbers, scales = self.split(pool, is_key=is_key)
        values = numbers.astype(np.float32) * self.spread(scales, is_key=is_key)
        stored = values if self.element == np.float32 else bfloat16(values)
        return np.ascontiguousarray(stored.astype(self.element, copy=False)).view(np.uint8).reshape(len(pool), -1)


def bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("level", WHOLE_LEVELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_stored_values_are_the_computed_ones_rounded_to_a_scale(level: str, shape: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3", tmp_path, **SHAPES[shape])
    plain, eight = decoders(checkpoint, level, Format.FLOAT32)
    for decoder in (plain, eight):
        run(decoder, 100, 1, 40, 9)
    layout = Layout(Format.FLOAT32, plain._weights.spec.head_dim, level)
    for index, is_key in ((0, True), (1, False)):  # of the first layer, whose inputs are the same in both
        exact = plain.pools[index].view(np.float32).reshape(NUM_PAGES + 1, -1, 16 * layout.head_dim)
        exact = layout.ordered(exact, is_key=is_key)
        numbers, scales = layout.split(eight.pools[index], is_key=is_key)
        stored = layout.ordered(numbers, is_key=is_key)
        for group in range(layout.num_scales(is_key=is_key)):
            channels = slice(group * CHANNELS, (group + 1) * CHANNELS if is_key else None)
            greatest = np.abs(exact[..., channels]).max(axis=3) / np.float32(127)
            scale = (bfloat16(greatest).astype(np.uint32) << 16).view(np.float32)
            assert np.array_equal(scales[:, :, group], scale)
            with np.errstate(divide="ignore", invalid="ignore"):
                inverse = np.where(scale > 0, np.float32(1) / scale, 0).astype(np.float32)
            assert np.array_equal(
                stored[..., channels], np.rint(exact[..., channels] * inverse[..., None]).clip(-127, 127)
            )


@pytest.mark.parametrize(("level", "shape"), [*product(WHOLE_LEVELS, [ODD]), *product([FASTEST], SHAPES)])
@pytest.mark.parametrize("format_", PLAIN_FORMATS, ids=lambda f: f.name.lower())
def test_attention_reads_the_values_that_the_bytes_stand_for(
    format_: Format, level: str, shape: str, tmp_path: Path
) -> None:
    """A pool with exactly these elements gives the same bits if the order of additions is the same: with one scale per
    key, and powers of two as scales. The step writes its own keys to the trash page.
    """
    checkpoint = make_checkpoint("mistral", tmp_path, **{"sliding_window": None, **SHAPES[shape]})
    plain, eight = decoders(checkpoint, level, format_)
    for decoder in (plain, eight):
        run(decoder, NUM_TOKENS)
    layout = Layout(format_, plain._weights.spec.head_dim, level)
    for index, (to, pool) in enumerate(zip(plain.pools, eight.pools, strict=True)):
        scales = layout.tiles(pool, is_key=index % 2 == 0)[1]
        scales[..., 0::2] &= 0x80  # bfloat16 without a mantissa
        scales[..., 1::2] &= 0x7F
        to[:] = layout.elements(pool, is_key=index % 2 == 0)
    tolerance = 0.0 if layout.num_scales(is_key=True) == 1 else ROUNDING[format_]
    for start in (NUM_TOKENS - 1, NUM_TOKENS - 30):  # a decode, and a chunk
        inputs = make_inputs([(TOKENS, start, NUM_TOKENS - start)], num_pages=NUM_PAGES)
        inputs.slot_mapping[:] = 0
        expected = plain.run(inputs).logits.copy()
        difference = np.abs(eight.run(inputs).logits - expected).max()
        assert difference <= tolerance * np.abs(expected).max(), start


@pytest.mark.parametrize(
    ("family", "shape"), [("mistral", ODD), ("mistral", IN_REGISTERS), ("gemma2", IN_REGISTERS), ("youtu", LATENTS)]
)
@pytest.mark.parametrize("format_", PLAIN_FORMATS, ids=lambda f: f.name.lower())
def test_logits_have_the_same_bits_in_any_chunks_and_batches(
    format_: Format, family: str, shape: str, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(family, tmp_path, **{"sliding_window": 70, **SHAPES.get(shape, {})})
    plain, decoder = decoders(checkpoint, FASTEST, format_)
    alone = run(decoder, NUM_TOKENS)
    for sizes in ([7] * 21 + [3], [64, 64, 22], [120, *[1] * 30]):
        assert np.array_equal(run(decoder, *sizes), alone), sizes
    mates = [(np.random.default_rng(seed).integers(0, 77, 60, dtype=np.int32), 0, 30 + seed) for seed in (1, 2)]
    first = decoder.run(make_inputs([(TOKENS, 0, 60), *mates], num_pages=NUM_PAGES)).logits[:60]
    assert np.array_equal(first, alone[:60])
    exact = run(plain, NUM_TOKENS)
    assert 0 < np.abs(alone - exact).max() < 0.3 * np.abs(exact).max()


def test_content_left_in_a_page_by_an_earlier_sequence_has_no_effect(tmp_path: Path) -> None:
    _, decoder = decoders(make_checkpoint("llama", tmp_path), FASTEST, Format.BFLOAT16)
    clean = run(decoder, 33)
    for pool in decoder.pools:
        pool[:] = 0xFF  # its scales are NaN
    assert np.array_equal(run(decoder, 20, 1, 12), clean)


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
def test_nan_stays_nan(level: str, value: float, name: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen2", tmp_path)
    with changed_tensors(checkpoint) as tensors:
        tensors[f"model.layers.1.self_attn.{name}.bias"][3] = value
    _, decoder = decoders(checkpoint, level, Format.BFLOAT16)
    outputs = decoder.run(make_inputs([(TOKENS, 0, 20)], num_pages=NUM_PAGES))
    assert np.isnan(outputs.greatest).all()


def test_page_takes_about_half_the_memory_of_bfloat16(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path, head_dim=128)
    plain, eight = decoders(checkpoint, FASTEST, Format.BFLOAT16)
    assert [e.nbytes / p.nbytes for e, p in zip(eight.pools[:2], plain.pools, strict=False)] == [136 / 256, 130 / 256]
    engine = NativeEngine(checkpoint, tmp_path, kv_dtype="int8", dtype="bfloat16")
    assert engine.card.backend == f"native bfloat16, int8 keys and values on {FASTEST}"


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_batches_preemption_and_shared_prefixes_change_no_token(preemption: str, tmp_path: Path) -> None:
    engine = NativeEngine(
        make_checkpoint("llama", tmp_path), tmp_path, kv_dtype="int8", dtype="bfloat16", host_pages=32
    )

    def requests() -> list[Any]:
        return [make_request(index // 2, 40, 30) if index % 2 else make_request(index, 20, 60) for index in range(6)]

    for index, request in enumerate(requests()):
        request.key = (index, 0)
    alone = [engine.run(request)[0] for request in requests()]
    together = requests()
    for index, request in enumerate(together):
        request.key, request.arrival = (index, 0), index
    assert engine.run(*together, num_pages=16, preemption=preemption, host_pages=32) == alone


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"backend": "transformers"}, "backend is 'transformers'"),
        ({"head_dim": 24}, "its heads have 24 channels"),
    ],
)
def test_eight_bits_without_the_compiled_kernels_are_refused(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(
        "llama", tmp_path, **{name: value for name, value in options.items() if name != "backend"}
    )
    reason = f"kv_dtype is 'int8', which only the native kernels have on a CPU: {why}"
    with pytest.raises(ConfigError, match=reason) as refusal:
        NativeEngine(checkpoint, tmp_path, kv_dtype="int8", backend=options.get("backend", "auto"))
    assert refusal.value.param == "kv_dtype"


def test_unknown_kv_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_dtype is 'fp8', known are: auto, int8"):
        CacheConfig(kv_dtype="fp8")
