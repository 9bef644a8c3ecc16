"""The row-wise operations of a dense decoder between its matrix products. Axes: T tokens, C channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .sizes import cdiv, next_power_of_2


@triton.jit
def _normed(h, weight, c, C, eps):
    """RMS norm of a row h with channels c, times their weights, in float32."""
    wide = h.to(tl.float32)
    size = tl.rsqrt(tl.sum(wide * wide, 0) / C + eps)
    return wide * size * tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def _add_norm(x, residual, added_weight, weight, output, multiplier, eps,
              C: tl.constexpr, BLOCK: tl.constexpr, NORMS_ADDED: tl.constexpr, ADDS: tl.constexpr,
              NORMS: tl.constexpr):  # fmt: skip
    """One program: one token. The norm reads the sum as rounded for storage."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    is_channel = c < C
    h = tl.load(x + t * C + c, mask=is_channel, other=0.0)
    if NORMS_ADDED:
        h = _normed(h, added_weight, c, C, eps).to(h.dtype)
    if ADDS:
        old = tl.load(residual + t * C + c, mask=is_channel, other=0.0).to(tl.float32)
        h = (h.to(tl.float32) * multiplier + old).to(h.dtype)  # if 1, the fma is an addition, at the same speed
    tl.store(residual + t * C + c, h, mask=is_channel)
    if NORMS:
        scaled = _normed(h, weight, c, C, eps)
        tl.store(output + t * C + c, scaled.to(output.dtype.element_ty), mask=is_channel)


@triton.jit
def _norm_queries_keys(qkv, query_norm, key_norm, eps, qkv_token,
                       Q: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program norms the queries of a token, or its keys."""
    row = qkv + tl.program_id(0).to(tl.int64) * qkv_token
    c = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        h = tl.load(row + c, mask=c < Q, other=0.0)
        tl.store(row + c, _normed(h, query_norm, c, Q, eps).to(h.dtype), mask=c < Q)
    else:
        h = tl.load(row + Q + c, mask=c < K, other=0.0)
        tl.store(row + Q + c, _normed(h, key_norm, c, K, eps).to(h.dtype), mask=c < K)


@triton.jit
def gated(gate, up, IS_GELU: tl.constexpr):
    """``up`` times the activated gate, in float32."""
    z = gate
    if IS_GELU:  # 1 + tanh(y) is 2 * sigmoid(2 * y)
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(z) * up


@triton.jit
def _gate_mul(gate_up, output, C: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr):
    """One program computes some channels of one token."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + t * 2 * C + c, mask=c < C, other=0.0).to(tl.float32)
    up = tl.load(gate_up + t * 2 * C + C + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(output + t * C + c, gated(gate, up, IS_GELU).to(output.dtype.element_ty), mask=c < C)


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    added_weight: torch.Tensor | None = None,
    adds: bool = True,
    multiplier: float = 1.0,
) -> torch.Tensor:
    """RMS norm [T, C] of ``residual + multiplier * x``, which is stored in ``residual``; without ``adds``, of x alone.

    With ``added_weight``, x is normed before it is added. Without ``weight``, returns the sum itself, not a copy.
    """
    output = residual if weight is None else torch.empty_like(x)
    num_tokens, num_channels = x.shape
    if num_tokens:
        block = next_power_of_2(num_channels)
        _add_norm[(num_tokens,)](
            x, residual, x if added_weight is None else added_weight, x if weight is None else weight, output,
            multiplier, eps, C=num_channels, BLOCK=block, NORMS_ADDED=added_weight is not None, ADDS=adds,
            NORMS=weight is not None, num_warps=_num_warps(block),
        )  # fmt: skip
    return output


def norm_queries_keys(qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor], eps: float) -> None:
    """In-place RMS norms of the first channels of a merged projection, its queries, and of the next, its keys.

    ``norms`` are the weights of both, one for each channel.
    """
    query_norm, key_norm = norms
    block = next_power_of_2(max(len(query_norm), len(key_norm)))
    if len(qkv):
        _norm_queries_keys[len(qkv), 2](
            qkv, query_norm, key_norm, eps, qkv.stride(0), Q=len(query_norm), K=len(key_norm), BLOCK=block,
            num_warps=_num_warps(block),
        )  # fmt: skip


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 512))


def gate_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """``activation(gate) * up`` [T, C] of a merged projection [T, 2 C]; ``activation`` is "silu" or "gelu_tanh"."""
    num_tokens, num_channels = len(gate_up), gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, num_channels)
    if num_tokens:
        block = min(2048, next_power_of_2(num_channels))
        _gate_mul[num_tokens, cdiv(num_channels, block)](
            gate_up, output, C=num_channels, BLOCK=block, IS_GELU=activation == "gelu_tanh"
        )
    return output
