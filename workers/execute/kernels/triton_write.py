"""Writing keys and values to their slots: as given, or from the merged projection, normed and rotated on the way.

Axes: T tokens, H query heads, J key heads, D and E channels; pages are [N, P, J, D], so a slot is a row of J * D.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .sizes import next_power_of_2


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


@triton.jit
def _either(first, second, is_channel, is_first):
    """Loads from ``first`` if ``is_first``, otherwise from ``second``, as float32."""
    one, other = tl.load(first, mask=is_channel, other=0.0), tl.load(second, mask=is_channel, other=0.0)
    return tl.where(is_first, one, other).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _rotate_write(
    qkv, query, keys, values, slots, positions, cosines, sines, query_norm, key_norm, norm_eps, growth, span, qkv_token,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    TURNS: tl.constexpr, HAS_NORM: tl.constexpr, GROWS: tl.constexpr,
):  # fmt: skip
    """One program: one head of one token. Channel i is rotated with channel i + D / 2."""
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, HALF)
    is_channel = i < D // 2
    source = qkv + t * qkv_token + head * D
    low_in = tl.load(source + i, mask=is_channel, other=0.0)
    high_in = tl.load(source + D // 2 + i, mask=is_channel, other=0.0)
    slot = tl.load(slots + t).to(tl.int64)
    if head >= H + J:
        target = values + (slot * J + head - H - J) * D
        tl.store(target + i, low_in, mask=is_channel)
        tl.store(target + D // 2 + i, high_in, mask=is_channel)
    else:
        low, high = low_in.to(tl.float32), high_in.to(tl.float32)
        is_query = head < H
        if HAS_NORM:
            size = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / D + norm_eps)
            low *= size * _either(query_norm + i, key_norm + i, is_channel, is_query)
            high *= size * _either(query_norm + D // 2 + i, key_norm + D // 2 + i, is_channel, is_query)
        if TURNS:
            position = tl.load(positions + t).to(tl.int64)
            cos = tl.load(cosines + position * (D // 2) + i, mask=is_channel, other=0.0)
            sin = tl.load(sines + position * (D // 2) + i, mask=is_channel, other=0.0)
            low, high = low * cos - high * sin, high * cos + low * sin
        if GROWS:
            factor = 1.0 + growth * tl.log((1 + tl.load(positions + t) // span).to(tl.float32))
            factor = tl.where(is_query, factor, 1.0)
            low, high = low * factor, high * factor
        new_low, new_high = low.to(query.dtype.element_ty), high.to(query.dtype.element_ty)
        if is_query:
            target = query + (t * H + head) * D
            tl.store(target + i, new_low, mask=is_channel)
            tl.store(target + D // 2 + i, new_high, mask=is_channel)
        else:
            target = keys + (slot * J + head - H) * D
            tl.store(target + i, new_low, mask=is_channel)
            tl.store(target + D // 2 + i, new_high, mask=is_channel)


def write_slots(source: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes a step's keys or values [T, J, D] to pages [N, P, J, D] at its slot mapping [T]."""
    num_tokens, num_heads, dim = source.shape
    if not num_tokens:
        return
    if source.stride(2) != 1:
        source = source.contiguous()
    _write[(num_tokens,)](
        source, pages, slots, source.stride(0), source.stride(1), pages.stride(1),
        J=num_heads, D=dim, BLOCK=next_power_of_2(num_heads * dim),
    )  # fmt: skip


def rotate_and_write(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
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
    multiplied by ``1 + growth * log(1 + p // growth_span)``.
    """
    num_kv_heads, dim = keys.shape[2:]
    query = qkv.new_empty(len(qkv), num_heads, dim)
    cosines, sines = rope or (qkv, qkv)
    query_norm, key_norm = norms or (qkv, qkv)
    if len(qkv):
        _rotate_write[len(qkv), num_heads + 2 * num_kv_heads](
            qkv, query, keys, values, slots, positions, cosines, sines, query_norm, key_norm, norm_eps, growth,
            growth_span, qkv.stride(0),
            H=num_heads, J=num_kv_heads, D=dim, HALF=next_power_of_2(dim // 2),
            TURNS=rope is not None, HAS_NORM=norms is not None, GROWS=growth != 0, num_warps=1,
        )  # fmt: skip
    return query
