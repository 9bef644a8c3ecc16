"""The matrix kernels at every level that this processor supports, compared with float64."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.workers.execute.kernels.levels import LEVELS_AND_FORMATS, WHOLE_LEVELS, load_cached
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.matrix import Mxfp4, Packer, Placement, matrix_bytes, new_matrix
from triptych.workers.execute.kernels.memory import Arena, padded
from triptych.workers.execute.kernels.structures import Format, Matrix

Floats = npt.NDArray[np.float32]

# Relative to the greatest output: the error of float sums, of rounding both factors to bfloat16, of both to 8 bits,
# and of one to 8 bits when the other is exactly what its 4 bits stand for.
TOLERANCES = dict(zip(Format, (2e-6, 1e-2, 3e-2, 3e-2, 3e-2, 3e-2), strict=True))
# Rows, inputs and outputs.
SHAPES = [
    (1, 1, 1), (1, 63, 65), (5, 100, 130), (7, 576, 192), (32, 49, 200), (13, 257, 64), (70, 80, 70), (2, 2048, 20),
]  # fmt: skip

each_level_and_format = pytest.mark.parametrize(
    ("level", "format_"), LEVELS_AND_FORMATS, ids=lambda part: part.name.lower() if isinstance(part, Format) else part
)


class Packed:
    """A random matrix, packed."""

    def __init__(self, level: str, format_: Format, num_inputs: int, num_outputs: int) -> None:
        self.library, self.format, self.num_outputs = load_cached(level), format_, num_outputs
        rng = np.random.default_rng(num_inputs * num_outputs)
        self._arena = Arena(matrix_bytes(format_, num_inputs, num_outputs))
        self.matrix: Matrix = new_matrix(self._arena, format_, num_inputs, num_outputs, has_bias=False)
        packer, place = Packer(self.library, num_threads=2), Placement(self.matrix, num_outputs)
        if format_ is Format.MXFP4:
            packer.pack_mxfp4(random_mxfp4(rng, num_inputs, num_outputs), place)
            self.weights = packer.unpack(place)
            return
        weights = rng.standard_normal((num_outputs, num_inputs), dtype=np.float32)
        packer.pack(weights.ctypes.data, place, is_bf16=False)
        self.weights = packer.unpack(place) if format_.has_groups else weights

    def multiply(self, x: Floats) -> Floats:
        y = np.empty((len(x), padded(self.num_outputs)), np.float32)
        x = np.ascontiguousarray(x)
        self.library.triptych_multiply(ctypes.byref(self.matrix), x.ctypes.data, len(x), y.ctypes.data)
        return y[:, : self.num_outputs]


def random_mxfp4(rng: np.random.Generator, num_inputs: int, num_outputs: int) -> Mxfp4:
    numbers = rng.integers(0, 256, (num_outputs, num_inputs // 2), np.uint8)
    return Mxfp4(numbers, rng.integers(124, 128, (num_outputs, num_inputs // 32), np.uint8))


def random_rows(count: int, size: int) -> Floats:
    return np.random.default_rng(count).standard_normal((count, size), dtype=np.float32)


@each_level_and_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_equals_float64(level: str, format_: Format, shape: tuple[int, int, int]) -> None:
    num_rows, num_inputs, num_outputs = shape
    if format_ is Format.MXFP4:
        num_inputs = padded(num_inputs, 32)  # only whole groups exist
    packed, x = Packed(level, format_, num_inputs, num_outputs), random_rows(num_rows, num_inputs)
    exact = x.astype(np.float64) @ packed.weights.astype(np.float64).T
    scale = np.sqrt(num_inputs) * 4
    assert np.abs(packed.multiply(x) - exact).max() < TOLERANCES[format_] * max(scale, np.abs(exact).max())


@each_level_and_format
def test_row_has_the_same_bits_in_any_batch(level: str, format_: Format) -> None:
    packed, x = Packed(level, format_, 224, 150), random_rows(40, 224)
    together = packed.multiply(x)
    for count in (1, 2, 5, 6, 7, 8, 10, 13, 16, 17, 34):
        assert np.array_equal(packed.multiply(x[3 : 3 + count]), together[3 : 3 + count])


@pytest.mark.parametrize("level", WHOLE_LEVELS)
@pytest.mark.parametrize(
    ("format_", "most"), [(Format.INT8, 12), (Format.INT4, 35), (Format.MXFP4, 35), (Format.FINE_INT4, 35)], ids=str
)
def test_one_large_channel_leaves_the_others_their_precision(level: str, format_: Format, most: float) -> None:
    """With one scale for all channels, the error would be 60 times as large."""
    packed, x = Packed(level, format_, 512, 64), random_rows(8, 512)

    def error(x: Floats) -> float:
        exact = x.astype(np.float64) @ packed.weights.astype(np.float64).T
        return float(np.abs(packed.multiply(x) - exact).mean())

    large = x.copy()
    large[:, 77] *= 200
    assert error(large) < most * error(x)


@pytest.mark.parametrize("level", WHOLE_LEVELS)
@pytest.mark.parametrize("num_inputs", [40, 48, 96, 384, 2048])
def test_transformed_weights_are_those_of_the_walsh_hadamard_matrix(level: str, num_inputs: int) -> None:
    packed = Packed(level, Format.INT8, num_inputs, 20)
    block = num_inputs & -num_inputs
    walsh = np.ones((1, 1), np.float32)
    while len(walsh) < block:
        walsh = np.block([[walsh, walsh], [walsh, -walsh]])
    weights = (packed.weights.reshape(20, -1, block) @ walsh).reshape(20, num_inputs)
    units = np.abs(weights).max(axis=1, keepdims=True) / 127
    unpacked = Packer(packed.library, num_threads=1).unpack(Placement(packed.matrix, 20))
    numbers = (unpacked.reshape(20, -1, block) @ walsh).reshape(20, num_inputs) / units
    assert np.abs(numbers - np.rint(weights / units)).max() < 1.001  # a tie may be rounded to either side
    assert np.abs(numbers - np.rint(numbers)).max() < 0.01


@pytest.mark.parametrize("level", available_levels())
def test_bfloat16_weights_are_packed_like_equal_floats(level: str) -> None:
    packed = Packed(level, Format.BFLOAT16, 70, 90)
    narrow = torch.from_numpy(packed.weights).bfloat16()
    again = Packed(level, Format.BFLOAT16, 70, 90)
    Packer(again.library, num_threads=1).pack(narrow.data_ptr(), Placement(again.matrix, 90), is_bf16=True)
    x = random_rows(3, 70)
    assert np.array_equal(packed.multiply(x), again.multiply(x))


def test_products_in_four_bits_take_at_most_twice_as_long_as_in_eight() -> None:
    """A tile whose sums do not stay in registers gives the same results, in three times the time or more."""
    x = random_rows(32, 1024)

    def best_time(format_: Format) -> float:
        packed = Packed(available_levels()[0], format_, 1024, 1024)
        times = []
        for _ in range(9):
            start = time.thread_time()
            packed.multiply(x)
            times.append(time.thread_time() - start)
        return min(times)

    eight = best_time(Format.INT8)
    assert max(best_time(Format.INT4), best_time(Format.MXFP4)) < 2 * eight
