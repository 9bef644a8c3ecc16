"""Copies of whole pages, on the device and between device and host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..scheduling.moves import Moves, Pairs

_STAGE_BYTES = 64 << 20  # per copy: copying this much takes much longer than the launch


class PageMover:
    """Moves pages of all layers. Copies are bytewise, so a page returns unchanged.

    Work on the device is ordered with the steps around it. The host waits for outgoing pages, and so for the step in
    flight, but not for incoming ones.
    """

    def __init__(self, pools: list[torch.Tensor], num_host_pages: int = 0) -> None:
        """``pools`` are the tensors that hold pages, each with one row [...] per page, the trash page first."""
        self._device = pools
        self._host = [torch.zeros(num_host_pages, *pages.shape[1:], dtype=pages.dtype) for pages in pools]
        self._stage = _Stage(pools, num_host_pages)

    def __call__(self, moves: Moves) -> None:
        """Each group of moves reads everything before it writes; see ``Moves`` for the order of the groups."""
        if not self._device:
            return
        place = self._device[0].device  # common to all layers: indices are sent once, not per layer
        for part in self._stage.parts(moves.swap_out):
            self._swap_out(part, place)
        if moves.copies:
            sources, targets = (_sent(column, place) for column in _columns(moves.copies))
            for pages in self._device:
                pages[targets] = pages[sources]
        for part in self._stage.parts(moves.swap_in):
            self._swap_in(part, place)

    def _swap_out(self, pairs: Pairs, place: torch.device) -> None:
        leaving, host_leaving = _columns(pairs)
        leaving = _sent(leaving, place)
        for pages, staged in zip(self._device, self._stage.pages, strict=True):
            staged[: len(pairs)].copy_(pages[leaving], non_blocking=True)
        self._stage.launched()
        self._stage.wait()
        for host, staged in zip(self._host, self._stage.pages, strict=True):
            host[host_leaving] = staged[: len(pairs)]

    def _swap_in(self, pairs: Pairs, place: torch.device) -> None:
        coming, host_coming = _columns(pairs)
        coming = _sent(coming, place)
        self._stage.wait()
        for pages, host, staged in zip(self._device, self._host, self._stage.pages, strict=True):
            torch.index_select(host, 0, host_coming, out=staged[: len(pairs)])
            pages[coming] = staged[: len(pairs)].to(place, non_blocking=True)
        self._stage.launched()


class _Stage:
    """A staging buffer between device and host for some pages of all layers, pinned if the device has its own memory.

    Host pages themselves are not pinned: there may be many, torch's allocator rounds each pinned tensor up to a power
    of two, and scattered pages have to be gathered for a copy anyway.
    """

    def __init__(self, pools: list[torch.Tensor], num_host_pages: int) -> None:
        page_bytes = sum(pages[0].nbytes for pages in pools)
        num_pages = min(num_host_pages, max(1, _STAGE_BYTES // max(1, page_bytes)))
        is_apart = any(pages.is_cuda for pages in pools)
        self.pages = [
            torch.empty(num_pages, *pages.shape[1:], dtype=pages.dtype, pin_memory=is_apart and num_pages > 0)
            for pages in pools
        ]
        self._max_pairs = max(1, num_pages)
        self._is_done: Any = torch.cuda.Event() if is_apart else None  # type: ignore[no-untyped-call]

    def parts(self, pairs: Pairs) -> Iterator[Pairs]:
        """Split ``pairs`` into parts that fit in the stage."""
        for start in range(0, len(pairs), self._max_pairs):
            yield pairs[start : start + self._max_pairs]

    def launched(self) -> None:
        """Note that all copies to or from the stage have been launched."""
        if self._is_done is not None:
            self._is_done.record()

    def wait(self) -> None:
        """Wait until they are done; before that, the host must neither read nor write the stage."""
        if self._is_done is not None:
            self._is_done.synchronize()


def _columns(pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second elements of N pairs, int64 [N] each."""
    first, second = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    return first, second


def _sent(column: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Copy to the device without waiting for its current work."""
    if place.type != "cuda" or not len(column):
        return column.to(place)
    return column.pin_memory().to(place, non_blocking=True)
