"""How weights are rounded to four bits if some of their inputs matter more, compared with the same in numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.workers.execute.kernels.levels import FASTEST, WHOLE_LEVELS, load_cached
from triptych.workers.execute.kernels.matrix import Packer, Placement, matrix_bytes, new_matrix
from triptych.workers.execute.kernels.memory import Arena
from triptych.workers.execute.kernels.structures import Format

Floats = npt.NDArray[np.float32]
NUM_INPUTS, NUM_OUTPUTS = 200, 70
FORMATS = pytest.mark.parametrize("format_", [Format.INT4, Format.FINE_INT4], ids=lambda f: f.name.lower())


def packed(weights: torch.Tensor, format_: Format, importance: Floats | None, level: str = FASTEST) -> Floats:
    """The values that weights are rounded to."""
    num_outputs, num_inputs = weights.shape
    arena = Arena(matrix_bytes(format_, num_inputs, num_outputs))
    place = Placement(new_matrix(arena, format_, num_inputs, num_outputs, has_bias=False), num_outputs)
    packer = Packer(load_cached(level), num_threads=2)
    packer.pack(weights.data_ptr(), place, is_bf16=weights.dtype == torch.bfloat16, importance=importance)
    return packer.unpack(place)


def in_bfloat16(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).bfloat16().item()


def rounded(weights: npt.NDArray[np.float64], importance: npt.NDArray[np.float64], format_: Format) -> Floats:
    """As ``pack_int4.h`` describes it: of some ranges, each refined by weighted least squares, the best."""

    def nearest(scale: float, least: float) -> npt.NDArray[np.float64]:
        return np.rint((weights - least) / scale).clip(0, 15)

    def attempts() -> Iterator[npt.NDArray[np.float64]]:
        least, spread = float(weights.min()), float(np.ptp(weights))
        scale, start = in_bfloat16(spread / 15), in_bfloat16(least)
        yield scale * nearest(scale, start) + start
        ranges = [(part * spread / 15, least + (1 - part) / 2 * spread, 4) for part in (0.95, 0.8)]
        ranges += [(spread / steps, least, 1) for steps in range(14, 7, -1) if format_ is Format.FINE_INT4]
        for scale, start, num_refinements in ranges:
            scale, start = in_bfloat16(scale), in_bfloat16(start)
            for _ in range(num_refinements):
                numbers = nearest(scale, start)
                design = np.stack([numbers, np.ones_like(numbers)], axis=1) * np.sqrt(importance)[:, None]
                scale, start = map(in_bfloat16, np.linalg.lstsq(design, weights * np.sqrt(importance), rcond=None)[0])
            yield scale * nearest(scale, start) + start

    return min(attempts(), key=lambda values: float(importance @ np.square(values - weights))).astype(np.float32)


def some_weights(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=torch.Generator().manual_seed(0)).to(dtype)


def some_importance() -> Floats:
    """Over four orders of magnitude, as of the channels of a trained model."""
    return np.exp(np.random.default_rng(0).normal(0, 2.5, NUM_INPUTS)).astype(np.float32)


@pytest.mark.parametrize("level", WHOLE_LEVELS)
@FORMATS
def test_weighed_rounding_is_as_exact_as_that_of_numpy(level: str, format_: Format) -> None:
    weights, importance = some_weights(), some_importance()
    found, exact = packed(weights, format_, importance, level), weights.numpy()
    size = format_.group_inputs
    for start in range(0, NUM_INPUTS // size * size, size):
        part = slice(start, start + size)
        of_group = importance[part].astype(np.float64)
        expected = np.stack([rounded(row.astype(np.float64), of_group, format_) for row in exact[:, part]])
        own, other = (np.square(values - exact[:, part]) @ of_group for values in (found[:, part], expected))
        assert np.isclose(own, other, rtol=1e-3).mean() > 0.9  # a weight between two numbers may become either
        assert own.sum() == pytest.approx(other.sum(), rel=5e-3)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
@FORMATS
def test_weighed_rounding_has_the_smaller_weighed_error(format_: Format, source: torch.dtype) -> None:
    weights, importance = some_weights(source), some_importance()
    exact = weights.float().numpy()
    errors = [np.square(packed(weights, format_, of_inputs) - exact) @ importance for of_inputs in (importance, None)]
    assert errors[0].sum() < 0.7 * errors[1].sum()
    assert np.mean(errors[0] <= errors[1]) > 0.95  # of the outputs


@pytest.mark.parametrize("level", WHOLE_LEVELS)
@FORMATS
def test_inputs_that_matter_alike_change_no_bit(level: str, format_: Format) -> None:
    weights, alike = some_weights(), np.ones(NUM_INPUTS, np.float32)
    assert np.array_equal(packed(weights, format_, alike, level), packed(weights, format_, None, level))


@FORMATS
def test_weights_on_a_grid_stay_there_whatever_matters(format_: Format) -> None:
    numbers = torch.randint(0, 16, (NUM_OUTPUTS, NUM_INPUTS), generator=torch.Generator().manual_seed(0))
    numbers[:, ::32], numbers[:, 1::32] = 0, 15
    weights = numbers * 0.125 - 1
    assert np.array_equal(packed(weights, format_, some_importance()), weights.numpy())
