from __future__ import annotations

import numpy as np

from triptych.workers.execute.sampling.rng import uniforms


def test_number_is_a_function_of_seed_and_position() -> None:
    alone = uniforms([7], [12])
    among_others = uniforms([3, 7, 9], [12, 12, 0])
    assert alone[0] == among_others[1]


def test_numbers_never_change() -> None:
    """A request recovered by a newer version continues as it began."""
    by_python_integers = [0.28176129772258496, 0.2191151301314187, 0.5268763636163535]
    assert uniforms([0, 1, 2**63 - 1], [0, 5, 4096]).tolist() == by_python_integers


def test_numbers_lie_in_the_half_open_unit_interval() -> None:
    numbers = uniforms(np.arange(200_000), np.arange(200_000)[::-1])
    assert numbers.min() >= 0.0
    assert numbers.max() <= 1 - 2.0**-53


def test_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in (
        uniforms(np.full(100_000, 5), np.arange(100_000)),
        uniforms(np.arange(100_000), np.full(100_000, 5)),
    ):
        counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
        chi_square = ((counts - 100_000 / 64) ** 2 / (100_000 / 64)).sum()
        assert chi_square < 63 + 5 * np.sqrt(2 * 63)  # five standard deviations
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / np.sqrt(100_000)


def test_streams_of_neighbouring_seeds_do_not_overlap() -> None:
    streams = {float(x) for seed in range(50) for x in uniforms(np.full(200, seed), np.arange(200))}
    assert len(streams) == 50 * 200
