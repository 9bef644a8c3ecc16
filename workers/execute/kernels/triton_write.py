"""Writing keys and values to their slots: as given, or from the merged projection, normed and rotated on the way; and
in eight bits, where the pages have them.

Axes: T tokens, H query heads, J key heads, D and E channels; pages are [N, P, J, D], so a slot is a row of J * D. In
eight bits a token and head has S scales, in [N, J, S, P].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .sizes import KEY_GROUP, cdiv, next_power_of_2
from .triton_eight_bits import GROUP, inverse_of, magnitude_of, numbers_of, scale_of

_CHANNELS = 512  # pairs of channels of a program that rotates: a warp has 256 of them, so it loads 16 bytes a thread


# Addresses that change from step to step must not trigger a recompilation, which takes seconds.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write(source, pages, slots, source_token, source_head, slot_size,
           J: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program writes one token's keys, or its values."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    slot = tl.load(slots + t).to(tl.int64)
    x = tl.load(source + t * source_token + (i // D) * source_head + i % D, mask=i < J * D)
    tl.store(pages + slot * slot_size + i, x, mask=i < J * D)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_eight_bits(source, pages, scales, slots, source_token, source_head, slot_size,
                      P: tl.constexpr, J: tl.constexpr, D: tl.constexpr, S: tl.constexpr, FIRST_SCALE: tl.constexpr,
                      SIZE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_R: tl.constexpr,
                      BLOCK_C: tl.constexpr):  # fmt: skip
    """One program writes one token's keys, or its values. Its rows are the groups of SIZE channels of all heads."""
    t = tl.program_id(0).to(tl.int64)
    r, c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    head, group = r // GROUPS, r % GROUPS
    channel = group[:, None] * SIZE + c[None, :]
    is_row = r < J * GROUPS
    is_channel = is_row[:, None] & (c < SIZE)[None, :] & (channel < D)
    slot = tl.load(slots + t).to(tl.int64)
    x = tl.load(source + t * source_token + head[:, None] * source_head + channel, mask=is_channel, other=0.0)
    x = x.to(tl.float32)
    scale = scale_of(tl.max(magnitude_of(x), 1))
    tl.store(pages + slot * slot_size + head[:, None] * D + channel, numbers_of(x, inverse_of(scale)[:, None]),
             mask=is_channel)  # fmt: skip
    place = (slot // P * J + head) * (S * P) + (FIRST_SCALE + group) * P + slot % P
    tl.store(scales + place, scale.to(scales.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _rotate_write(
    qkv, query, keys, values, scales, slots, positions, cosines, sines, query_norm, key_norm, norm_eps, growth, span,
    qkv_token,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr, TURNS: tl.constexpr, HAS_NORM: tl.constexpr, GROWS: tl.constexpr,
):  # fmt: skip
    """One program: some heads of one token. Channel i is rotated with channel i + D / 2."""
    t, i = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_half = i < D // 2
    is_channel = (head < H + 2 * J) & is_half[None, :]
    is_query, is_value = head < H, head >= H + J
    source = qkv + t * qkv_token + head * D + i[None, :]
    low_in = tl.load(source, mask=is_channel, other=0.0).to(tl.float32)
    high_in = tl.load(source + D // 2, mask=is_channel, other=0.0).to(tl.float32)
    low, high = low_in, high_in
    if HAS_NORM:
        size = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + norm_eps)[:, None]
        low *= size * _norm_of(query_norm, key_norm, i, is_half, is_query)
        high *= size * _norm_of(query_norm, key_norm, D // 2 + i, is_half, is_query)
    if TURNS:
        position = tl.load(positions + t).to(tl.int64)
        cos = tl.load(cosines + position * (D // 2) + i, mask=is_half, other=0.0)[None, :]
        sin = tl.load(sines + position * (D // 2) + i, mask=is_half, other=0.0)[None, :]
        low, high = low * cos - high * sin, high * cos + low * sin
    if GROWS:
        factor = 1.0 + growth * tl.log((1 + tl.load(positions + t) // span).to(tl.float32))
        low, high = tl.where(is_query, low * factor, low), tl.where(is_query, high * factor, high)
    low, high = tl.where(is_value, low_in, low), tl.where(is_value, high_in, high)
    slot = tl.load(slots + t).to(tl.int64)
    _store(query + (t * H + head) * D + i[None, :], low, high, is_channel & is_query, D)
    is_key = ~is_query & ~is_value
    if S:
        scales += slot // P * (J * S * P) + slot % P
        low, high = _rounded(low, high, scales, head, is_key, is_value, i, H, J, D, P, S)
    _store(keys + (slot * J + head - H) * D + i[None, :], low, high, is_channel & is_key, D)
    _store(values + (slot * J + head - H - J) * D + i[None, :], low, high, is_channel & is_value, D)


@triton.jit
def _rounded(low, high, scales, head, is_key, is_value, i, H: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
             P: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """The numbers of keys and values in eight bits, after storing their scales from ``scales`` on. What is no channel
    is zero.
    """
    low_size, high_size = magnitude_of(low), magnitude_of(high)
    scale = scale_of(tl.maximum(tl.max(low_size, 1), tl.max(high_size, 1)))[:, None]
    place = scales + ((head - H - J) * S + S - 1) * P
    tl.store(place, scale.to(scales.dtype.element_ty), mask=is_value & (head < H + 2 * J))
    low_inverse, high_inverse = inverse_of(scale), inverse_of(scale)
    for group in tl.static_range(S - 1):
        in_low, in_high = (i // GROUP == group)[None, :], ((D // 2 + i) // GROUP == group)[None, :]
        low_greatest = tl.max(tl.where(in_low, low_size, 0), 1)
        high_greatest = tl.max(tl.where(in_high, high_size, 0), 1)
        scale = scale_of(tl.maximum(low_greatest, high_greatest))[:, None]
        tl.store(scales + ((head - H) * S + group) * P, scale.to(scales.dtype.element_ty), mask=is_key)
        low_inverse = tl.where(is_key & in_low, inverse_of(scale), low_inverse)
        high_inverse = tl.where(is_key & in_high, inverse_of(scale), high_inverse)
    return numbers_of(low, low_inverse), numbers_of(high, high_inverse)


@triton.jit
def _norm_of(query_norm, key_norm, i, is_half, is_query):
    """The weights of channels i, float32 [HEADS, HALF], of queries or of keys."""
    of_query = tl.load(query_norm + i, mask=is_half, other=0.0).to(tl.float32)
    of_key = tl.load(key_norm + i, mask=is_half, other=0.0).to(tl.float32)
    return tl.where(is_query, of_query[None, :], of_key[None, :])


@triton.jit
def _store(target, low, high, mask, D: tl.constexpr):
    tl.store(target, low.to(target.dtype.element_ty), mask=mask)
    tl.store(target + D // 2, high.to(target.dtype.element_ty), mask=mask)


def write_slots(source: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes a step's keys or values [T, J, D] to pages [N, P, J, D] of its type at its slot mapping [T]."""
    num_tokens, num_heads, dim = source.shape
    if not num_tokens:
        return
    if source.stride(2) != 1:
        source = source.contiguous()
    _write[(num_tokens,)](
        source, pages, slots, source.stride(0), source.stride(1), pages.stride(1),
        J=num_heads, D=dim, BLOCK=next_power_of_2(num_heads * dim),
    )  # fmt: skip


def write_eight_bits(
    source: torch.Tensor, pages: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, *, is_key: bool
) -> None:
    """Writes a step's keys or values [T, J, D] to pages int8 [N, P, J, D] and their scales [N, J, S, P]."""
    num_tokens, num_heads, dim = source.shape
    if not num_tokens:
        return
    if source.stride(2) != 1:
        source = source.contiguous()
    group = KEY_GROUP if is_key else dim
    groups = cdiv(dim, group)
    _write_eight_bits[(num_tokens,)](
        source, pages, scales, slots, source.stride(0), source.stride(1), pages.stride(1),
        P=pages.shape[1], J=num_heads, D=dim, S=scales.shape[2], FIRST_SCALE=0 if is_key else scales.shape[2] - 1,
        SIZE=group, GROUPS=groups, BLOCK_R=next_power_of_2(num_heads * groups), BLOCK_C=next_power_of_2(group),
    )  # fmt: skip


def rotate_and_write(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    norm_eps: float,
    num_heads: int,
    growth: float = 0.0,
    growth_span: int = 1,
) -> torch.Tensor:
    """Rotated queries [T, H, D] from a merged projection [T, (H + 2 J) * D]; writes its keys and values to their slots.

    ``rope`` is cosines and sines, float32 [positions, D / 2]; without it nothing is rotated. With ``norms``, weights
    [D] each, queries and keys are RMS-normed head by head before the rotation (Qwen3). A query at position p is
    multiplied by ``1 + growth * log(1 + p // growth_span)``. With ``scales`` [N, J, S, P] the pages are int8.
    """
    num_kv_heads, dim = keys.shape[2:]
    query = qkv.new_empty(len(qkv), num_heads, dim)
    cosines, sines = rope or (qkv, qkv)
    query_norm, key_norm = norms or (qkv, qkv)
    if len(qkv):
        half = next_power_of_2(dim // 2)
        heads = min(next_power_of_2(num_heads + 2 * num_kv_heads), max(1, _CHANNELS // half))
        _rotate_write[len(qkv), cdiv(num_heads + 2 * num_kv_heads, heads)](
            qkv, query, keys, values, keys if scales is None else scales, slots, positions, cosines, sines, query_norm,
            key_norm, norm_eps, growth, growth_span, qkv.stride(0),
            H=num_heads, J=num_kv_heads, D=dim, P=keys.shape[1], S=0 if scales is None else scales.shape[2],
            HALF=half, HEADS=heads,
            TURNS=rope is not None, HAS_NORM=norms is not None, GROWS=growth != 0,
            num_warps=max(1, heads * half // 256),
        )  # fmt: skip
    return query
