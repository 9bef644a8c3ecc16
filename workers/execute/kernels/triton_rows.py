"""What a dense decoder does row by row between its matrix products. Axes: T tokens, C channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_norm(x, residual, weight, output, multiplier, eps,
              C: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr):  # fmt: skip
    """One program: one token. What is added is rounded as it is stored, and normed as it was rounded."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    is_channel = c < C
    h = tl.load(x + t * C + c, mask=is_channel, other=0.0)
    if ADDS:
        old = tl.load(residual + t * C + c, mask=is_channel, other=0.0).to(tl.float32)
        h = (h.to(tl.float32) * multiplier + old).to(h.dtype)  # with 1 an addition, and as quick
    tl.store(residual + t * C + c, h, mask=is_channel)
    wide = h.to(tl.float32)
    size = tl.rsqrt(tl.sum(wide * wide, 0) / C + eps)
    scaled = wide * size * tl.load(weight + c, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(output + t * C + c, scaled.to(output.dtype.element_ty), mask=is_channel)


@triton.jit
def _silu_mul(gate_up, output, C: tl.constexpr, BLOCK: tl.constexpr):
    """One program: some channels of one token."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + t * 2 * C + c, mask=c < C, other=0.0).to(tl.float32)
    up = tl.load(gate_up + t * 2 * C + C + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(output + t * C + c, (gate * tl.sigmoid(gate) * up).to(output.dtype.element_ty), mask=c < C)


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    adds: bool = True,
    multiplier: float = 1.0,
) -> torch.Tensor:
    """RMS norm [T, C] of ``residual + multiplier * x``, which is left in ``residual``; without ``adds`` of x alone."""
    output = torch.empty_like(x)
    num_tokens, num_channels = x.shape
    if num_tokens:
        block = triton.next_power_of_2(num_channels)
        _add_norm[(num_tokens,)](
            x, residual, weight, output, multiplier, eps, C=num_channels, BLOCK=block, ADDS=adds,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return output


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` [T, C] of a merged projection [T, 2 C]."""
    num_tokens, num_channels = len(gate_up), gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, num_channels)
    if num_tokens:
        block = min(2048, triton.next_power_of_2(num_channels))
        _silu_mul[num_tokens, triton.cdiv(num_channels, block)](gate_up, output, C=num_channels, BLOCK=block)
    return output
