"""Brings the KV pool into memory before it is used, while there is nothing else to do.

Otherwise the system provides each page of memory at the first write to it, in the middle of a prompt. That costs little
where memory is at hand, and much in a virtual machine that must get it from its host first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ..kernels.memory import HUGE_PAGE, populate
from .memory import available_bytes

_SHARE_LEFT = 0.5  # of the memory that was free at first: pages that may never be used should not take the last of it


class Prefault:
    """The memory of some tensors, of which those on a GPU are ignored."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        available: Callable[[], int] = lambda: available_bytes(torch.device("cpu")),
    ) -> None:
        self._available = available
        self._left_bytes = _SHARE_LEFT * available()
        self._pieces = _pieces_of([tensor for tensor in tensors if tensor.device.type == "cpu"])

    def advance(self, seconds: float) -> bool:
        """Work for about that long, at least on one piece. Returns whether to go on later.

        Once memory is scarce, or if the system cannot do this, the rest is left as it is.
        """
        end = time.perf_counter() + seconds
        if self._available() < self._left_bytes:
            return False
        for address, num_bytes in self._pieces:
            if not populate(address, num_bytes):
                return False
            if time.perf_counter() >= end:
                return True
        return False


def _pieces_of(tensors: list[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Addresses and sizes. Low page ids are used first, so the beginnings of all tensors come first."""
    for offset in range(0, max((tensor.nbytes for tensor in tensors), default=0), HUGE_PAGE):
        for tensor in tensors:
            if offset < tensor.nbytes:
                yield tensor.data_ptr() + offset, min(HUGE_PAGE, tensor.nbytes - offset)
