"""Counter-based random numbers: a function of (seed, position), so no state has to be stored or replayed.

Source: SplitMix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: the step of the counter


def uniforms(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), multiples of 2**-53: float64 [R] of two uint64 [R].

    The seed is mixed before the position is added, so the streams of neighbouring seeds are not shifted copies.
    """
    stream = _mix(np.asarray(seeds, dtype=np.uint64) + _GOLDEN)
    bits = _mix(stream + np.asarray(positions, dtype=np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: UInt64) -> UInt64:
    """A bijection of 64 bits in which each input bit flips each output bit with probability one half."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
