"""Graphs of launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.fake_cuda.operators import Operator
from tests.fake_cuda.tensors import tensors_in

GARBAGE = 77  # in memory of integers that nothing may read yet


class Graph:
    """What was launched during a capture. To find the shapes of results, a capture computes once and takes it back."""

    def __init__(self) -> None:
        self._launches: list[Callable[[], object]] = []
        self._owned: dict[int, torch.Tensor] = {}  # memory of the graph itself, by address
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # other memory, as it was

    def launch(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        given = [x.untyped_storage() for x in tensors_in((args, kwargs))]
        for storage in given:
            if storage.data_ptr() not in self._owned:
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))  # type: ignore[no-untyped-call]
        result = operator(*args, **kwargs)
        results, addresses = tensors_in(result), {storage.data_ptr() for storage in given}
        fresh = {x.untyped_storage().data_ptr(): x for x in results}
        self._owned |= {address: x for address, x in fresh.items() if address not in addresses}

        def launch_again() -> None:
            for old, new in zip(results, tensors_in(operator(*args, **kwargs)), strict=True):
                if old is not new:
                    old.copy_(new)

        self._launches.append(launch_again)
        return result

    def end(self) -> None:
        for storage, content in self._before.values():
            storage.copy_(content)
        self._before.clear()

    def replay(self) -> None:
        with on_the_host():
            for tensor in self._owned.values():  # other graphs of the pool have used it
                tensor.fill_(float("nan") if tensor.is_floating_point() else GARBAGE)
            for launch in self._launches:
                launch()


@contextmanager
def on_the_host() -> Iterator[None]:
    """Operators are the host's own, and may write to any tensor."""
    with torch.inference_mode(), _disable_current_modes():
        yield
