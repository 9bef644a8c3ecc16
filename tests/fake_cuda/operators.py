"""What a GPU computes, and a CPU or the interpreter of kernels does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

Operator = Callable[..., Any]


def dot_of(create_dot: Operator) -> Operator:
    """The interpreter's products, but of bfloat16 too, whose bits it would multiply as integers."""

    def widened(factor: Any) -> Any:
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        return TensorHandle((factor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    return lambda self, a, b, *rest: create_dot(self, widened(a), widened(b), *rest)


def float_of(convert: Operator) -> Operator:
    """The interpreter's integers as numbers of other types, but of bfloat16 too, whose bits it would set to them."""

    def converted(self: Any, x: Any, target: Any) -> Any:
        if target.scalar != tl.bfloat16:
            return convert(self, x, target)
        assert x.data.dtype == np.int8, "others are not exact"
        return TensorHandle((x.data.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16), tl.bfloat16)

    return converted


def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None = None,
    _scale: Any = None, out_dtype: torch.dtype = torch.bfloat16, *_: Any, **__: Any,
) -> torch.Tensor:  # fmt: skip
    product = a.float() @ b.float() * scale_a * scale_b
    return (product if bias is None else product + bias.float()).to(out_dtype)


EMULATED: dict[str, Operator] = {  # which a CPU does not have
    "aten::_scaled_mm": _scaled_mm,
    "aten::histc": lambda x, *args, **kwargs: torch.histc(x.float(), *args, **kwargs).to(x.dtype),
}
