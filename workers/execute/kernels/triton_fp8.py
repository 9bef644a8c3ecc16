"""Quantising rows to eight-bit floating point in one launch, bit for bit as ``fused.fp8`` defines it. Axes as there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .sizes import next_power_of_2


@triton.jit
def _quantize_rows(x, values, scales, x_row, greatest_value, least_scale, K: tl.constexpr, BLOCK: tl.constexpr):
    """One program quantises one row, which it reads once."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    row = tl.load(x + t * x_row + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(row), 0), greatest_value), least_scale)
    tl.store(scales + t, scale)
    # A quotient exceeds the greatest value by at most its last bit, which rounding removes.
    tl.store(values + t * K + k, tl.div_rn(row, scale).to(values.dtype.element_ty), mask=k < K)


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, *, greatest: float, least_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [T, K] in an eight-bit ``dtype`` with maximum ``greatest``, and their scales, float32 [T, 1]."""
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, num_inputs = x.shape
    values = x.new_empty(num_rows, num_inputs, dtype=dtype)
    scales = x.new_empty(num_rows, 1, dtype=torch.float32)
    if num_rows:
        block = next_power_of_2(num_inputs)
        _quantize_rows[(num_rows,)](
            x, values, scales, x.stride(0), greatest, least_scale, K=num_inputs, BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return values, scales
