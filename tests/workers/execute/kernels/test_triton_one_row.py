"""Products of one row against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import HAS_GPU

pytest.importorskip("triton")

from triptych.workers.execute.kernels.triton_one_row import OneRowTile, one_row_linear, one_row_tile
from triptych.workers.execute.model.fused.fp8 import scaled

# What Triton's interpreter computes with numpy where a GPU says nothing.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

DEVICE = "cuda" if HAS_GPU else "cpu"
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh")}


def defined(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, norm: torch.Tensor | None = None,
    eps: float = 0.0, activation: str | None = None, residual: torch.Tensor | None = None, multiplier: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    double = [None if t is None else t.double() for t in (x, weight, bias, norm)]
    rows, matrix, added, weights = double
    assert rows is not None
    assert matrix is not None
    if weights is not None:
        rows = F.rms_norm(rows, weights.shape, weights, eps)
    total = F.linear(rows, matrix, added)
    if activation is not None:
        gate, up = total.chunk(2, dim=1)
        total = ACTIVATIONS[activation](gate) * up
    return total if residual is None else residual.double() + multiplier * total


@pytest.mark.parametrize(
    "names",
    [(), ("bias", "norm"), ("bias", "silu"), ("norm", "silu"), ("gelu_tanh",), ("residual",), ("bias", "residual")],
    ids="-".join,
)
def test_equals_the_definition(names: tuple[str, ...]) -> None:
    """With sizes that are no multiples of a tile's."""
    torch.manual_seed(0)
    num_outputs, num_inputs = 70, 72
    x, weight, bias, norm, residual = (
        torch.randn(*shape, device=DEVICE)
        for shape in ((1, num_inputs), (num_outputs, num_inputs), (num_outputs,), (num_inputs,), (1, num_outputs))
    )
    form: dict[str, Any] = {"activation": next((name for name in names if name in ACTIVATIONS), None)}
    if "norm" in names:
        form |= {"norm": norm, "eps": 0.1}
    if "residual" in names:
        form |= {"residual": residual, "multiplier": 0.25}
    added = bias if "bias" in names else None
    expected = defined(x, weight, added, **form)
    output = one_row_linear(x, weight, added, **form)
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)
    if "residual" in names:
        assert output is residual


@pytest.mark.parametrize("names", [(), ("bias",), ("bias", "silu"), ("residual",)], ids="-".join)
def test_weights_in_fp8_stand_for_what_their_scales_make_of_them(names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    x, bias, residual = (torch.randn(*shape, device=DEVICE) for shape in ((1, 72), (70,), (1, 70)))
    weight = scaled(torch.randn(70, 72, device=DEVICE) * torch.logspace(-3, 3, 70, device=DEVICE)[:, None])
    form: dict[str, Any] = {"activation": "silu" if "silu" in names else None}
    if "residual" in names:
        form["residual"] = residual
    added = bias if "bias" in names else None
    expected = defined(x, weight.values.double() * weight.scales, added, **form)
    output = one_row_linear(x, weight.values, added, scales=weight.scales, **form)
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)


def test_output_has_the_requested_type() -> None:
    x, weight = torch.ones(1, 16, device=DEVICE).half(), torch.ones(3, 16, device=DEVICE).half()
    assert one_row_linear(x, weight, dtype=torch.float32).dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(4096, 12288), (151936, 1024)])
def test_equals_the_definition_in_the_served_type(num_outputs: int, num_inputs: int) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, num_inputs, device=DEVICE).bfloat16() for n in (1, num_outputs))
    weight *= num_inputs**-0.5
    norm = torch.rand(num_inputs, device=DEVICE).bfloat16()
    for form in ({}, {"norm": norm, "eps": 1e-6}, {"norm": norm, "eps": 1e-6, "activation": "silu"}):
        expected = defined(x, weight, **form)  # type: ignore[arg-type]
        output = one_row_linear(x, weight, dtype=torch.float32, **form)  # type: ignore[arg-type]
        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_inputs", [8, 576, 4096, 12288, 28672])
def test_program_reads_at_most_eight_times_sixteen_bytes_a_thread_of_rows_that_fit(num_inputs: int) -> None:
    for gates in (False, True):
        tile = one_row_tile(100_000, num_inputs, 2, gates=gates)
        num_bytes = tile.num_outputs * (2 if gates else 1) * (1 << (num_inputs - 1).bit_length()) * 2
        assert num_bytes <= 128 * 32 * tile.num_warps or tile.num_outputs == 1


def test_few_outputs_are_spread_among_programs() -> None:
    assert one_row_tile(100_000, 4096, 2, gates=False) == OneRowTile(4, 8)
    assert one_row_tile(512, 4096, 2, gates=False) == OneRowTile(1, 8)


def test_weights_in_eight_bits_have_fewer_programs_with_more_to_do_each() -> None:
    assert one_row_tile(100_000, 4096, 1, gates=False) == OneRowTile(8, 4)
    assert one_row_tile(100_000, 4096, 1, gates=True) == OneRowTile(4, 4)
    assert one_row_tile(100_000, 12288, 1, gates=False) == OneRowTile(4, 8)
