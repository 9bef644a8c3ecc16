"""Keys and values in eight bits, by definition: numbers -127..127 and their scales.

Every 32 channels of a key share a scale, and a value has one scale, in bfloat16: keys of some models have a few
channels much larger than all others, which would leave these no precision. (The kernels of a CPU mix channels first,
see ``kernels/src/eight_bits.h``.) What is stored for a token depends only on its own channels. A token with a channel
that is NaN or infinite gets scales that are NaN.

Axes: those of ``interface``, and S = ceil(D / 32) + 1 scales of a token and head: those of its key, then that of its
value. The scales of a page are stored scale by scale, so that a tile of keys loads its own side by side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..kernels.sizes import KEY_GROUP, cdiv, num_scales
from .interface import LayerCache

_GREATEST = 127
_LEAST_SCALE = 2.0**-100  # what is smaller is stored as zeros


def quantize(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers int8 [..., C] of channels [..., C], and the scales of their groups, bfloat16 [..., ceil(C / group)]."""
    num_channels, num_groups = x.shape[-1], cdiv(x.shape[-1], group)
    groups = F.pad(x.float(), (0, -num_channels % group)).reshape(*x.shape[:-1], num_groups, group)
    greatest = groups.abs().amax(dim=-1)
    greatest = torch.where(groups.isfinite().all(dim=-1), greatest, torch.nan)
    scales = (greatest / _GREATEST).bfloat16()
    # In double precision the product is exact, so it is rounded once.
    inverse = torch.where(scales > _LEAST_SCALE, 1 / scales.float(), 0.0).double()
    numbers = (groups.nan_to_num(0.0, 0.0, 0.0).double() * inverse[..., None]).round().to(torch.int8)
    return numbers.flatten(-2)[..., :num_channels], scales


def dequantize(numbers: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    """What the numbers [..., C] with scales [..., ceil(C / group)] stand for, float32 [..., C]."""
    return numbers.float() * scales.float().repeat_interleave(group, dim=-1)[..., : numbers.shape[-1]]


def write_tokens(cache: LayerCache, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Store keys [T, J, D] and values [T, J, E] in slots [T] of pages in eight bits."""
    assert cache.scales is not None, "the pages have eight bits"
    for pages, x, group, first in _parts(cache, key, value):
        numbers, scales = quantize(x, group)
        pages.flatten(0, 1)[slots] = numbers
        page, offset = slots // cache.keys.shape[1], slots % cache.keys.shape[1]
        for number in range(scales.shape[-1]):
            cache.scales[page, :, first + number, offset] = scales[..., number]


def read_pages(cache: LayerCache, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the pages in ``table`` [W], float32 [W * P, J, D] and [W * P, J, E]."""
    assert cache.scales is not None, "the pages have eight bits"
    scales = cache.scales[table].permute(0, 3, 1, 2).flatten(0, 1)  # [W * P, J, S]
    keys, values = (pages[table].flatten(0, 1) for pages in (cache.keys, cache.values))
    return dequantize(keys, scales[..., :-1], KEY_GROUP), dequantize(values, scales[..., -1:], values.shape[-1])


def _parts(
    cache: LayerCache, key: torch.Tensor, value: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """Pages, what is written to them, the size of a group, and the number of its first scale."""
    last = num_scales(key.shape[-1]) - 1
    return [(cache.keys, key, KEY_GROUP, 0), (cache.values, value, value.shape[-1], last)]
