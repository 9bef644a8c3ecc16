"""Copies of whole pages, on the device and between device and host."""

from __future__ import annotations

import torch

from ..scheduling.moves import Moves, Pairs


class PageMover:
    """Moves pages of all layers. A copy is of bytes: what comes back is what went away."""

    def __init__(self, pools: list[torch.Tensor], num_host_pages: int = 0) -> None:
        """``pools`` are the tensors that hold pages, each with a row [...] for every page, the trash page first."""
        self._device = pools
        self._host = [_like_on_host(pages, num_host_pages) for pages in self._device]

    def __call__(self, moves: Moves) -> None:
        """Each group reads everything before it writes; see ``Moves`` for their order."""
        if not self._device:
            return
        place = self._device[0].device  # of all of them: indices are sent there once, not for each layer
        leaving, host_leaving = _columns(moves.swap_out)
        sources, targets = (_sent(column, place) for column in _columns(moves.copies))
        coming, host_coming = _columns(moves.swap_in)
        leaving, coming = _sent(leaving, place), _sent(coming, place)
        for device, host in zip(self._device, self._host, strict=True):
            if moves.swap_out:
                host[host_leaving] = device[leaving].to(host.device)
            if moves.copies:
                device[targets] = device[sources]
            if moves.swap_in:
                device[coming] = host[host_coming].to(place)


def _like_on_host(pages: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Pinned where that makes copies to the device faster."""
    pin = pages.is_cuda and num_pages > 0
    return torch.zeros(num_pages, *pages.shape[1:], dtype=pages.dtype, pin_memory=pin)


def _columns(pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [N] each."""
    first, second = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    return first, second


def _sent(column: torch.Tensor, place: torch.device) -> torch.Tensor:
    """On the device, without waiting for what it computes now."""
    if place.type != "cuda" or not len(column):
        return column.to(place)
    return column.pin_memory().to(place, non_blocking=True)
