"""Products in the tile registers of AMX."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tests.workers.execute.kernels import amx
from tests.workers.execute.kernels.test_multiply import Packed, random_rows
from triptych.workers.execute.kernels import compile as compiling
from triptych.workers.execute.kernels import tile_registers
from triptych.workers.execute.kernels.compile import LEVELS, available_levels
from triptych.workers.execute.kernels.structures import Format

emulated = pytest.mark.skipif(not amx.IS_EMULATED, reason="this processor has AMX, or lacks even AVX-512")


@emulated
@pytest.mark.parametrize("num_inputs", [64, 300, 49], ids=lambda count: f"{count} inputs")
def test_products_in_eight_bits_have_the_bits_of_other_levels(num_inputs: int) -> None:
    here, there = (Packed(level, Format.INT8, num_inputs, 150) for level in (amx.LEVEL, "avx512"))
    for num_rows in (1, 16, 31, 33, 50):
        x = random_rows(num_rows, num_inputs)
        assert np.array_equal(here.multiply(x), there.multiply(x)), num_rows


@emulated
def test_bfloat16_is_added_in_the_order_of_the_instruction() -> None:
    """The first and second numbers of the 16 pairs of a tile apart, tile by tile."""
    packed, x = Packed(amx.LEVEL, Format.BFLOAT16, 96, 16), random_rows(3, 96)
    a, b = (torch.from_numpy(rows).bfloat16().double().numpy() for rows in (x, packed.weights))
    sums = np.zeros((3, 16), np.float32)
    for start in range(0, 96, 32):
        halves = []
        for first in (0, 1):
            half = np.zeros((3, 16), np.float32)
            for k in range(start + first, start + 32, 2):  # the product of two bfloat16 is exact in float64
                half = (half + a[:, k, None] * b[None, :, k]).astype(np.float32)
            halves.append(half)
        sums += halves[0] + halves[1]
    assert np.array_equal(packed.multiply(x), sums)


@emulated
@pytest.mark.parametrize("format_", amx.FORMATS, ids=lambda f: f.name.lower())
def test_all_products_use_tiles_and_release_them(format_: Format) -> None:
    packed, kernels = Packed(amx.LEVEL, format_, 96, 64), amx.load_emulated()
    before = kernels.amx_count_products()
    packed.multiply(random_rows(1, 96))
    num_tiles = -(-format_.steps(96) // 16) * 4
    assert kernels.amx_count_products() - before == num_tiles
    assert kernels.amx_count_in_use() == 0


def test_level_is_left_out_if_the_system_refuses_its_registers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        @staticmethod
        def syscall(*arguments: int) -> int:
            ctypes.set_errno(1)
            return -1

    monkeypatch.setattr(compiling, "_processor_flags", lambda: set().union(*LEVELS.values()))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Refusing)
    monkeypatch.setattr(compiling, "are_permitted", tile_registers.are_permitted.__wrapped__)
    assert amx.LEVEL not in available_levels()
    assert "the system refuses it, Operation not permitted" in caplog.text
    monkeypatch.setattr(Refusing, "syscall", lambda *_: 0)
    assert amx.LEVEL in available_levels()
