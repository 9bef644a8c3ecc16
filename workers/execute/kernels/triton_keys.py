"""What the kernels of ``triton_select`` share: keys, masses, the filters of a row, and brackets."""

from __future__ import annotations

import triton
import triton.language as tl

END = tl.constexpr(0x7F800001)  # above the key of infinity
MUCH = tl.constexpr(1 << 62)  # above all masses


@triton.jit
def key_of(x, greatest, temperature):
    """How far below the greatest, as an int32 that ascends with it. NaN is infinitely far.

    The quotient is rounded correctly, after two steps of Newton's method, without the branch of a division.
    """
    temperature = tl.maximum(temperature, 1e-10)
    inverse = tl.div_rn(1.0, temperature)
    difference = greatest - x
    distance = difference * inverse
    distance = tl.fma(tl.fma(-distance, temperature, difference), inverse, distance)
    distance = tl.fma(tl.fma(-distance, temperature, difference), inverse, distance)
    return tl.where(distance >= 0, distance, float("inf")).to(tl.int32, bitcast=True)


@triton.jit
def likelihood_of(key):
    """Relative to the greatest, float32."""
    return tl.exp(-key.to(tl.float32, bitcast=True))


@triton.jit
def mass_of(likelihood):
    return (likelihood * 4398046511104.0).to(tl.int64)


@triton.jit
def load_filters(table, table_row, r):
    """Temperature, top-k, top-p, min-p and the random number of a row; the types are those of ``draw.Filters``."""
    temperature = tl.load(table + r).to(tl.float32)
    top_k = tl.load(table + table_row + r).to(tl.int32)
    top_p = tl.load(table + 2 * table_row + r)
    min_p = tl.load(table + 3 * table_row + r).to(tl.float32)
    return temperature, tl.maximum(top_k, 1), top_p, min_p, tl.load(table + 4 * table_row + r)


@triton.jit
def share_of(top_p, mass):
    """The mass that top-p keeps at least: a token is kept if less precedes it."""
    return tl.maximum(tl.minimum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), mass), 1)


@triton.jit
def target_in(number, mass):
    """The mass that precedes, or is part of, the drawn token: below ``mass``."""
    return tl.maximum(tl.minimum((number * mass.to(tl.float64)).to(tl.int64), mass - 1), 0)


@triton.jit
def threshold_in(lo, hi, place, count):
    """Threshold ``place`` of ``count`` at equal distances within a bracket."""
    return (lo + (hi.to(tl.int64) - lo) * (place + 1) // (count + 1)).to(tl.int32)


@triton.jit
def load_bracket(state):
    """The ends of a bracket, the masses below them, and the count below the lower one."""
    lo, hi = tl.load(state).to(tl.int32), tl.load(state + 1).to(tl.int32)
    return lo, hi, tl.load(state + 2), tl.load(state + 3), tl.load(state + 4).to(tl.int32)


@triton.jit
def store_bracket(state, bracket):
    tl.store(state, bracket[0].to(tl.int64))
    tl.store(state + 1, bracket[1].to(tl.int64))
    tl.store(state + 2, bracket[2])
    tl.store(state + 3, bracket[3])
    tl.store(state + 4, bracket[4].to(tl.int64))


@triton.jit
def load_four(row, token, end, BLOCK: tl.constexpr):
    """Logits of a token and three more; all are requested before the first is used."""
    x0 = tl.load(row + token, mask=token < end, other=float("-inf"))
    x1 = tl.load(row + token + BLOCK, mask=token + BLOCK < end, other=float("-inf"))
    x2 = tl.load(row + token + 2 * BLOCK, mask=token + 2 * BLOCK < end, other=float("-inf"))
    x3 = tl.load(row + token + 3 * BLOCK, mask=token + 3 * BLOCK < end, other=float("-inf"))
    return x0, x1, x2, x3


@triton.jit
def kept_mass(x, best, temperature, min_p):
    likelihood = likelihood_of(key_of(x, best, temperature))
    return tl.where(likelihood >= min_p, mass_of(likelihood), 0)
