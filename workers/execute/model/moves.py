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
        for device, host in zip(self._device, self._host, strict=True):
            if moves.swap_out:
                pages, host_pages = _columns(moves.swap_out)
                host[host_pages] = device[pages.to(device.device)].to(host.device)
            if moves.copies:
                sources, targets = (column.to(device.device) for column in _columns(moves.copies))
                device[targets] = device[sources]
            if moves.swap_in:
                pages, host_pages = _columns(moves.swap_in)
                device[pages.to(device.device)] = host[host_pages].to(device.device)


def _like_on_host(pages: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Pinned where that makes copies to the device faster."""
    pin = pages.is_cuda and num_pages > 0
    return torch.zeros(num_pages, *pages.shape[1:], dtype=pages.dtype, pin_memory=pin)


def _columns(pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [N] each."""
    first, second = torch.tensor(pairs, dtype=torch.int64).T
    return first, second
