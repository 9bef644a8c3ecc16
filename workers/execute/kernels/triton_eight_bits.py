"""Keys and values in eight bits, as ``attention.eight_bits`` defines them, within the kernels that write and read them.

Axes: pages are [N, P, J, D] and their scales [N, J, S, P], so a tile of keys loads each of its scales side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sizes import KEY_GROUP

GROUP = tl.constexpr(KEY_GROUP)


@triton.jit
def magnitude_of(x):
    """The bits of ``abs(x)`` as int32, which ascend with it: NaN is above infinity, and that above all numbers."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(greatest):
    """The scale of channels of which the greatest has this magnitude: float32, rounded to bfloat16; NaN if one of them
    is not finite.
    """
    scale = tl.div_rn(greatest.to(tl.float32, bitcast=True), 127.0)
    bits = scale.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(greatest < 0x7F800000, bits, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(scale):
    """Its reciprocal, or 0 if what it would scale is stored as zeros."""
    is_used = scale > 7.888609052210118e-31  # 2^-100; NaN is not
    return tl.where(is_used, tl.div_rn(1.0, tl.where(is_used, scale, 1.0)), 0.0)


@triton.jit
def numbers_of(x, inverse):
    """The numbers, int8. To add this constant leaves no place for fractions: it rounds, to even in the middle."""
    x = tl.where(inverse > 0, x, 0.0)
    return (tl.fma(x, inverse, 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def load_groups(rows, is_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The channels of rows at these addresses [R, 1], as a tuple of one tensor [R, GROUP] for each scale of a key."""
    parts = ()
    for i in tl.static_range(BLOCK_D // GROUP):
        d = i * GROUP + tl.arange(0, GROUP)
        part = tl.load(rows + d[None, :], mask=is_row & (d < D)[None, :], other=0.0)
        parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005, Triton does not unpack
    return parts


@triton.jit
def products_of(q_groups, keys, scales, is_key, P: tl.constexpr, D: tl.constexpr, dtype: tl.constexpr,
                BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Products of queries, from ``load_groups``, with keys at these addresses [BLOCK_N], float32 [BLOCK_G, BLOCK_N].

    A scale is applied to the product of its channels, which has as many numbers as there are queries, not to a key's.
    """
    products = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
    for i in tl.static_range(BLOCK_D // GROUP):
        d = i * GROUP + tl.arange(0, GROUP)
        numbers = tl.load(keys[None, :] + d[:, None], mask=is_key[None, :] & (d < D)[:, None], other=0)
        scale = tl.load(scales + i * P, mask=is_key, other=0.0).to(tl.float32)
        product = tl.dot(q_groups[i], numbers.to(dtype), input_precision="ieee")
        products = tl.fma(product, tl.broadcast_to(scale[None, :], [BLOCK_G, BLOCK_N]), products)
    return products


@triton.jit
def load_tile(keys, values, scales, page, offset, is_key, key_slot: tl.constexpr, value_slot: tl.constexpr,
              scale_page: tl.constexpr, P: tl.constexpr, S: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
              BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, HOLDS: tl.constexpr):  # fmt: skip
    """Numbers and scales of a head's keys and values at these places, for ``widened``: int8 and bfloat16, [BLOCK_N,
    BLOCK_D] each of keys, and [BLOCK_N, BLOCK_E] each of values.

    The compiler moves ``widened`` behind the exchange between warps, so that each of them widens what it multiplies,
    which is the least work if no two multiply the same. It does so if the scales are nothing but loaded, which they are
    not if it ``HOLDS``.
    """
    d, e, group = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_D // GROUP)
    is_row, slot = is_key[:, None], (page * P + offset)[:, None]
    own = scales + (page * scale_page + offset)[:, None]
    key_numbers = tl.load(keys + slot * key_slot + d[None, :], mask=is_row & (d < D)[None, :], other=0)
    value_numbers = tl.load(values + slot * value_slot + e[None, :], mask=is_row & (e < E)[None, :], other=0)
    key_scales = tl.load(own + group[None, :] * P, mask=is_row & (group < S - 1)[None, :], other=0.0)
    value_scales = tl.load(own + (S - 1) * P, mask=is_row, other=0.0)
    if HOLDS:
        key_scales = tl.where(is_row, key_scales.to(tl.float32), 0.0)
        value_scales = tl.where(is_row, value_scales.to(tl.float32), 0.0)
    spread = tl.broadcast_to(key_scales[:, :, None], [BLOCK_N, BLOCK_D // GROUP, GROUP])
    return (key_numbers, tl.reshape(spread, [BLOCK_N, BLOCK_D]),
            value_numbers, tl.broadcast_to(value_scales, [BLOCK_N, BLOCK_E]))  # fmt: skip


@triton.jit
def widened(numbers, scale, dtype: tl.constexpr):
    """What numbers with these scales stand for. Numbers are exact in any type, so this rounds once."""
    return (numbers.to(dtype).to(tl.float32) * scale.to(tl.float32)).to(dtype)
