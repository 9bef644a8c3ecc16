"""How a checkpoint's matrix is packed into blocks of columns, compared with the layout written in numpy."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.proc import address_space
from tests.workers.execute.kernels.levels import FASTEST, WHOLE_LEVELS, load_cached
from tests.workers.execute.model.native.decoders import in_sixteenths
from triptych.workers.execute.kernels import matrix
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.matrix import Mxfp4, Packer, Placement, matrix_bytes, new_matrix
from triptych.workers.execute.kernels.memory import Arena, padded
from triptych.workers.execute.kernels.structures import Format, Matrix
from triptych.workers.execute.model.native.lora import transformed

ELEMENTS = {Format.FLOAT32: np.float32, Format.BFLOAT16: np.uint16, Format.INT8: np.int8}
# inputs, outputs, first column, columns side by side in a block
PLACES = [(1, 1, 0, 64), (7, 64, 0, 64), (513, 100, 40, 64), (300, 65, 0, 32), (300, 65, 32, 32), (1030, 200, 9, 64)]


class Contents(NamedTuple):
    elements: npt.NDArray[Any]  # [columns, inputs], in the format's numbers
    scales: npt.NDArray[Any]  # int8 only, like the offsets: [columns]
    offsets: npt.NDArray[Any]


class Place:
    """A matrix with space for some weights, and the columns that they use."""

    def __init__(self, format_: Format, num_inputs: int, num_outputs: int, first: int, run: int) -> None:
        n = np.arange(num_outputs)
        self.format, self.num_inputs = format_, num_inputs
        self.columns = first + n // run * 64 + n % run
        self.num_columns = padded(int(self.columns[-1]) + 1)
        self._arena = Arena(matrix_bytes(format_, num_inputs, self.num_columns))
        self.matrix = new_matrix(self._arena, format_, num_inputs, self.num_columns, has_bias=False)
        self.place = Placement(self.matrix, num_outputs, first, run)

    def pack(self, level: str, weights: torch.Tensor) -> Packer:
        packer = Packer(load_cached(level), num_threads=2)
        packer.pack(weights.data_ptr(), self.place, is_bf16=weights.dtype == torch.bfloat16)
        return packer

    def products(self, level: str) -> npt.NDArray[np.float32]:
        """With a row of ones, [columns]."""
        x, y = np.ones(self.num_inputs, np.float32), np.empty(self.num_columns, np.float32)
        load_cached(level).triptych_multiply(ctypes.byref(self.matrix), x.ctypes.data, 1, y.ctypes.data)
        return y

    def contents(self) -> Contents:
        steps = self.format.steps(self.num_inputs)
        blocks = _array(self.matrix.blocks, (self.num_columns // 64, steps, 64, self.group), ELEMENTS[self.format])
        elements = blocks.transpose(0, 2, 1, 3).reshape(self.num_columns, -1)
        if self.format is not Format.INT8:
            return Contents(elements, np.empty(0, np.float32), np.empty(0, np.int32))
        scales = _array(self.matrix.scales, (self.num_columns,), np.float32)
        return Contents(elements, scales, _array(self.matrix.offsets, (self.num_columns,), np.int32))

    @property
    def group(self) -> int:
        """Values in 32 bits."""
        return 4 // np.dtype(ELEMENTS[self.format]).itemsize

    def expected(self, weights: torch.Tensor) -> Contents:
        elements = np.zeros((self.num_columns, padded(self.num_inputs, self.group)), ELEMENTS[self.format])
        scales, offsets = np.zeros(self.num_columns, np.float32), np.zeros(self.num_columns, np.int32)
        exact = weights.float().numpy()
        numbers: npt.NDArray[Any]
        if self.format is Format.INT8:
            mixed, block = transformed(weights.float())
            exact = mixed.numpy()
            limits = np.maximum(np.abs(exact).max(axis=1), np.float32(1e-30))
            numbers = np.rint(exact * (np.float32(127) / limits)[:, None]).astype(np.int8)
            scales[self.columns] = limits / np.float32(127) / np.float32(block)
            offsets[self.columns] = 128 * numbers.sum(axis=1, dtype=np.int32)
        elif self.format is Format.BFLOAT16:
            numbers = weights.bfloat16().view(torch.uint16).numpy()
        else:
            numbers = exact
        elements[self.columns, : self.num_inputs] = numbers
        return Contents(elements, scales, offsets)


def _array(address: int, shape: tuple[int, ...], element: type) -> npt.NDArray[Any]:
    """A copy of its content."""
    dtype: np.dtype[Any] = np.dtype(element)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(ctypes.string_at(address, size), dtype).reshape(shape)


@pytest.fixture(autouse=True)
def small_matrices_are_shared_by_threads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_FEW_WEIGHTS", 0)


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("format_", list(ELEMENTS), ids=lambda f: f.name.lower())
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_weight_is_in_its_place_and_the_rest_is_zero(
    level: str, format_: Format, source: torch.dtype, place: tuple[int, int, int, int]
) -> None:
    weights = torch.randn(place[1], place[0], generator=torch.Generator().manual_seed(0)).to(source)
    weights[-1] = 0  # a column without a greatest weight
    room = Place(format_, *place)
    packer = room.pack(level, weights)
    found, expected = room.contents(), room.expected(weights)
    for name in Contents._fields if format_ is Format.INT8 else ("elements",):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    if format_ is Format.INT8:
        numbers, scales = expected.elements[room.columns, : place[0]], expected.scales[room.columns, None]
        mixed, _ = transformed(torch.from_numpy(numbers * scales))
        assert np.array_equal(packer.unpack(room.place), mixed.numpy())


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_four_bits_are_more_exact_than_even_steps_between_the_limits(
    level: str, source: torch.dtype, place: tuple[int, int, int, int]
) -> None:
    weights = torch.randn(place[1], place[0], generator=torch.Generator().manual_seed(0)).to(source)
    weights[-1], weights[-2:-1, ::2] = 0, 0.5  # without a greatest weight, and with many equal ones
    room = Place(Format.INT4, *place)
    found, exact = room.pack(level, weights).unpack(room.place), weights.float().numpy()
    for start in range(0, place[0], 64):
        group = np.zeros((place[1], 64), np.float32)
        group[:, : min(64, place[0] - start)] = exact[:, start : start + 64]
        steps = np.maximum(np.ptp(group, axis=1, keepdims=True) / 15, 1e-30)
        least = group.min(axis=1, keepdims=True)
        even = np.rint((group - least) / steps) * steps + least
        error = np.square(found[:, start : start + 64] - exact[:, start : start + 64]).sum()
        rounding = np.square(np.abs(group).max(axis=1) / 256).sum()  # of both numbers of a group to bfloat16
        assert error <= np.square(even - group).sum() + rounding
    assert not found[-1].any()


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_values_exact_in_four_bits_are_restored(level: str, place: tuple[int, int, int, int]) -> None:
    weights = in_sixteenths(torch.randn(place[1], place[0], generator=torch.Generator().manual_seed(0)))
    room = Place(Format.INT4, *place)
    assert np.array_equal(room.pack(level, weights).unpack(room.place), weights.numpy())


@pytest.mark.parametrize("level", WHOLE_LEVELS)
@pytest.mark.parametrize("format_", [Format.INT8, Format.INT4], ids=lambda f: f.name.lower())
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_nan_weight_makes_its_output_nan(level: str, format_: Format, bad: float) -> None:
    weights = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    weights[3, 2] = weights[7, 69] = weights[12, 99] = bad
    room = Place(format_, 100, 20, 0, 64)
    room.pack(level, weights)
    assert np.flatnonzero(np.isnan(room.products(level))).tolist() == [3, 7, 12]


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("num_inputs", [3, 70, 100])
def test_incomplete_group_is_as_exact_as_a_complete_one(level: str, num_inputs: int) -> None:
    weights = torch.rand(20, num_inputs, generator=torch.Generator().manual_seed(0)) / 8 + 1
    found = Place(Format.INT4, num_inputs, 20, 0, 64)
    error = found.pack(level, weights).unpack(found.place) - weights.numpy()
    # Little more than half a step, as the least squares leave some at the ends out, and both numbers in bfloat16.
    assert np.abs(error).max() < 0.6 * 1 / 8 / 15 + 1 / 256


@pytest.mark.parametrize("level", WHOLE_LEVELS)
@pytest.mark.parametrize("place", [(32, 20, 0, 64), (96, 65, 0, 32), (96, 65, 32, 32), (2880, 70, 9, 64)], ids=str)
def test_mxfp4_equals_transformers(level: str, place: tuple[int, int, int, int]) -> None:
    """For every number, and every scale that is a float32."""
    num_inputs, num_outputs, *_ = place
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 256, (num_outputs, num_inputs // 32, 16), dtype=torch.uint8, generator=generator)
    numbers[0, 0] = torch.arange(16) * 16 + torch.arange(16).flip(0)
    scales = torch.randint(3, 252, numbers.shape[:2], dtype=torch.uint8, generator=generator)
    scales[:4, 0] = torch.tensor([0, 1, 2, 252])
    room = Place(Format.MXFP4, *place)
    packer = Packer(load_cached(level), num_threads=2)
    packer.pack_mxfp4(Mxfp4(numbers.flatten(1).numpy(), scales.numpy()), room.place)
    exact = convert_moe_packed_tensors(numbers[None], scales[None], dtype=torch.float64)[0].T
    assert np.array_equal(packer.unpack(room.place), exact.numpy())
    small = torch.full_like(scales, 120)  # above which a product of all of them is no float
    packer.pack_mxfp4(Mxfp4(numbers.flatten(1).numpy(), small.numpy()), room.place)
    sums = convert_moe_packed_tensors(numbers[None], small[None], dtype=torch.float64)[0].sum(dim=0).numpy()
    assert np.allclose(room.products(level)[room.columns], sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", WHOLE_LEVELS)
def test_nan_scale_makes_its_output_nan(level: str) -> None:
    numbers, scales = np.full((20, 48), 0x22, np.uint8), np.full((20, 3), 127, np.uint8)
    scales[3, 0] = scales[7, 2] = 255
    room = Place(Format.MXFP4, 96, 20, 0, 64)
    Packer(load_cached(level), num_threads=1).pack_mxfp4(Mxfp4(numbers, scales), room.place)
    assert np.flatnonzero(np.isnan(room.products(level))).tolist() == [3, 7]


def test_missing_memory_is_an_error_and_does_not_end_the_process() -> None:
    """No exception of C++ may reach Python's interpreter."""
    rows = Matrix(num_inputs=1 << 30, num_blocks=1, format=Format.INT8)  # 64 GiB as floats, which none are read of
    with address_space(1 << 30), pytest.raises(MemoryError, match="16 rows of 1073741824 weights in float32"):
        Packer(load_cached(FASTEST), num_threads=1).pack(0, Placement(rows, 16), is_bf16=False)
