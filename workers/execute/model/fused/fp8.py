"""Matrices in eight-bit floating point: a scale for each output of the weights, and for each token of the input.

Axes: T tokens, K inputs, N outputs. Numbers have 4 exponent and 3 mantissa bits (e4m3), up to 448.

Source: "FP8 Formats for Deep Learning", Micikevicius et al., 2022.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...kernels.triton_fp8 import quantize_rows
from ...kernels.triton_one_row import one_row_linear

FP8 = torch.float8_e4m3fn
_GREATEST = torch.finfo(FP8).max
_LEAST_SCALE = 1e-12  # used for a row of zeros
MULTIPLE = 16  # the hardware's product needs multiples of it as numbers of inputs and outputs


class Scaled(NamedTuple):
    """Rows in fp8: ``values * scales`` is what they stand for."""

    values: torch.Tensor  # fp8 [N, K] or [T, K]
    scales: torch.Tensor  # float32 [N, 1] or [T, 1]


def scaled(x: torch.Tensor) -> Scaled:
    """Quantize the rows of x to fp8, each scaled by its own greatest value.

    On a GPU this is one kernel launch, elsewhere ``defined_scaled``.
    """
    if x.is_cuda:
        return Scaled(*quantize_rows(x, FP8, greatest=_GREATEST, least_scale=_LEAST_SCALE))
    return defined_scaled(x)


def defined_scaled(x: torch.Tensor) -> Scaled:
    """Quantize with the same bits on every device.

    The divisor is a tensor, since a GPU would replace division by a host scalar with multiplication by its reciprocal.
    """
    greatest = torch.full((), _GREATEST, dtype=torch.float, device=x.device)
    scales = (x.abs().amax(dim=-1, keepdim=True).float() / greatest).clamp_min(_LEAST_SCALE)
    return Scaled((x.float() / scales).clamp(-_GREATEST, _GREATEST).to(FP8), scales)


class Fp8Projection(NamedTuple):
    """A matrix product with scales: by the hardware on a GPU, elsewhere by its definition."""

    weight: Scaled
    bias: torch.Tensor | None
    dtype: torch.dtype  # of the result

    @staticmethod
    def quantize(weight: torch.Tensor) -> Scaled:
        return scaled(weight)

    @classmethod
    def merge(cls, parts: list[Scaled], bias: torch.Tensor | None, dtype: torch.dtype) -> Fp8Projection:
        """Stack matrices along their outputs."""
        values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(FP8)  # cat does not support fp8
        return cls(Scaled(values, torch.cat([part.scales for part in parts])), bias, dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inputs = scaled(x)
        if x.is_cuda:
            # Fast accumulation keeps the sums in the matrix units. Moving them out in between would gain little
            # precision compared with what eight bits have lost, and long prompts would take up to twice as long.
            return torch._scaled_mm(
                inputs.values, self.weight.values.t(), inputs.scales, self.weight.scales.t(), bias=self.bias,
                out_dtype=self.dtype, use_fast_accum=True,
            )  # fmt: skip
        product = (inputs.values.float() @ self.weight.values.float().t()) * inputs.scales * self.weight.scales.t()
        return (product if self.bias is None else product + self.bias.float()).to(self.dtype)

    def one_row(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """Map [1, K] with the ``options`` of ``one_row_linear``; the inputs are not rounded to fp8."""
        return one_row_linear(x, self.weight.values, self.bias, scales=self.weight.scales, **options)
