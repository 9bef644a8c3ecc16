"""Runs the kernel for Hopper on a CPU, as ordinary Python: what it computes, and whether its groups of warps wait.

Groups are threads. What is asynchronous happens as late as it may, and in any order: a copy when somebody waits, a
product when it is waited for, which fails if its operands in shared memory have changed since it was asked for. Shared
memory begins as NaN, and is NaN from the moment a copy into it is asked for. Layouts and registers are not looked at.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

_WAIT_S = 20.0  # after which groups are taken to wait for each other


class Pointer:
    """Addresses of elements of a tensor, by their distance from its first."""

    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + offset)

    def load(self, mask: Any = True, other: Any = 0) -> Any:
        elements, places = self._elements()
        mask = torch.as_tensor(mask)
        places = torch.where(mask, places, 0)
        found = torch.where(mask, elements[places], torch.tensor(other, dtype=elements.dtype))
        return found if found.dim() else found.item()

    def store(self, value: torch.Tensor, mask: Any = True) -> None:
        elements, places = self._elements()
        mask = torch.as_tensor(mask).expand(value.shape)
        elements[places.expand(value.shape)[mask]] = value[mask]

    def _elements(self) -> tuple[torch.Tensor, torch.Tensor]:
        count = self.tensor.untyped_storage().nbytes() // self.tensor.itemsize
        places = torch.as_tensor(self.offset) + int(self.tensor.storage_offset())
        return self.tensor.as_strided((count,), (1,), 0), places


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def index(self, i: int) -> Shared:
        return Shared(self.tensor[i])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.tensor.permute(order))

    def load(self, _layout: None) -> torch.Tensor:
        return self.tensor.clone()

    def store(self, value: torch.Tensor) -> None:
        self.tensor.copy_(value)


class Barrier:
    """A phase ends when all have arrived and all bytes have come."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0


class Barriers(list[Barrier]):
    def index(self, i: int) -> Barrier:  # type: ignore[override]
        return self[i]


class Product:
    """An accumulator, from when its product is asked for."""

    def __init__(self, a: torch.Tensor, b: Shared, sums: torch.Tensor, use_acc: bool) -> None:
        self._a, self._b, self._sums = a, b, sums if use_acc else torch.zeros_like(sums)
        self._then = b.tensor.clone()
        self.value: torch.Tensor | None = None

    def finish(self) -> None:
        is_same = torch.equal(self._then.view(torch.int16), self._b.tensor.contiguous().view(torch.int16))
        assert is_same, "shared memory changed while a product read it"
        # In double precision, or BLAS would sum a row depending on its place, which no GPU does.
        self.value = (self._sums + self._a.double() @ self._b.tensor.double()).float()


class FakeHopper:
    """Launches a kernel in place of a GPU: ``FakeHopper(kernel, seed)[grid](...)``."""

    def __init__(self, kernel: Any, seed: int = 0) -> None:
        self._random, self._turn, self._own = random.Random(seed), threading.Condition(), threading.local()
        self._copies: list[tuple[Any, list[int], Barrier, Shared]] = []
        self._failure: BaseException | None = None
        self._function = self._translated(kernel)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, maxnreg: int, **constants: Any) -> None:
            given = [Pointer(each) if isinstance(each, torch.Tensor) else each for each in arguments]
            for number in range(grid[0]):
                self._own.place = (number, grid[0])
                self._function(*given, **constants)
                assert not self._copies, "nobody waited for a copy"

        return launch

    def _translated(self, kernel: Any) -> Any:
        """The function of the kernel, and those that it calls, with this object in place of the language."""
        names = dict(kernel.fn.__globals__)
        names |= {
            "gl": self._language(), "mbarrier": self, "_copy": self._copy, "fence_async_shared": lambda: None,
            "warpgroup_mma": self._multiply, "warpgroup_mma_wait": self._wait_for_products,
        }  # fmt: skip
        for name, value in list(names.items()):
            if hasattr(value, "fn"):
                names[name] = FunctionType(value.fn.__code__, names, name)
        return FunctionType(kernel.fn.__code__, names)

    def _specialize(self, groups: list[tuple[Any, Any]], _warps: list[int], _registers: list[int]) -> None:
        place = self._own.place

        def run(function: Any, arguments: Any) -> None:
            self._own.place, self._own.products = place, []
            try:
                function(*arguments)
                assert not self._own.products, "nobody waited for a product"
            except BaseException as error:
                with self._turn:
                    self._failure = self._failure or error
                    self._turn.notify_all()

        threads = [threading.Thread(target=run, args=group, daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    # Barriers.

    MBarrierLayout = staticmethod(lambda: Barrier)

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count

    def arrive(self, barrier: Barrier, count: int) -> None:
        with self._turn:
            barrier.missing -= count
            self._settle(barrier)

    def expect(self, barrier: Barrier, num_bytes: int, pred: bool = True) -> None:
        if pred:
            with self._turn:
                barrier.bytes += num_bytes
                barrier.missing -= 1
                self._settle(barrier)

    def wait(self, barrier: Barrier, parity: int) -> None:
        """Until the phases of this parity have ended, of which the barrier is in the last or past it."""
        with self._turn:
            while barrier.phase & 1 == parity:
                if self._failure is not None:
                    raise RuntimeError("another group failed")
                if self._copies:
                    self._finish(*self._copies.pop(self._random.randrange(len(self._copies))))
                elif not self._turn.wait(_WAIT_S):
                    raise TimeoutError("groups wait for each other")

    def _settle(self, barrier: Barrier) -> None:
        assert barrier.missing >= 0, "a barrier has more arrivals than it counts"
        if barrier.missing == barrier.bytes == 0:
            barrier.phase, barrier.missing = barrier.phase + 1, barrier.count
        self._turn.notify_all()

    # Copies and products.

    def _copy(self, source: Any, place: list[int], barrier: Barrier, target: Shared, pred: bool = True) -> None:
        if pred:
            with self._turn:
                target.tensor.fill_(torch.nan)
                self._copies.append((source, place, barrier, target))
                self._turn.notify_all()

    def _finish(self, source: Any, place: list[int], barrier: Barrier, target: Shared) -> None:
        whole = source.base.as_strided(source.shape, source.strides)
        rows, columns = (slice(at, at + size) for at, size in zip(place, source.block_shape, strict=True))
        target.tensor.copy_(whole[rows, columns])
        barrier.bytes -= target.tensor.nbytes
        self._settle(barrier)

    def _multiply(self, a: torch.Tensor, b: Shared, sums: Any, use_acc: bool = True, *, is_async: bool) -> Product:
        product = Product(a, b, sums, use_acc)
        self._own.products.append(product)
        return product

    def _wait_for_products(self, num_outstanding: int, deps: list[Product]) -> torch.Tensor:
        while len(self._own.products) > num_outstanding:
            self._own.products.pop(0).finish()
        value = deps[0].value
        assert value is not None, "this product may not have ended"
        return value

    def _language(self) -> SimpleNamespace:
        def either(of_tensors: Any, of_numbers: Any) -> Any:
            def call(a: Any, b: Any) -> Any:
                if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
                    return of_tensors(torch.as_tensor(a), torch.as_tensor(b))
                return of_numbers(a, b)

            return call

        def where(condition: Any, a: Any, b: Any) -> Any:
            return torch.where(condition, a, b) if isinstance(condition, torch.Tensor) else (a if condition else b)

        def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
            if layout is Barrier:
                return Barriers(Barrier() for _ in range(shape[0]))
            return Shared(torch.full(shape, torch.nan, dtype=dtype))

        def reduction(of_tensor: Any) -> Any:
            def call(x: torch.Tensor, axis: int) -> Any:
                found = of_tensor(x, axis)
                return found if found.dim() else found.item()

            return call

        def nothing(*_arguments: Any, **_options: Any) -> None:
            """In place of a layout."""

        return SimpleNamespace(
            program_id=lambda _axis: self._own.place[0], num_programs=lambda _axis: self._own.place[1],
            load=Pointer.load, store=Pointer.store, allocate_shared_memory=allocate, warp_specialize=self._specialize,
            where=where, maximum=either(torch.maximum, max), minimum=either(torch.minimum, min),
            cdiv=lambda a, b: -(-a // b), exp2=torch.exp2, fma=lambda a, b, c: a * b + c, sum=reduction(torch.sum),
            max=reduction(torch.amax), min=reduction(torch.amin),
            arange=lambda start, end, _layout=None: torch.arange(start, end),
            full=lambda shape, value, dtype, _layout: torch.full(tuple(shape), value, dtype=dtype),
            zeros=lambda shape, dtype, _layout: torch.zeros(tuple(shape), dtype=dtype),
            convert_layout=lambda value, _layout: value, static_range=range,
            int32=torch.int32, int64=torch.int64, float32=torch.float32, constexpr=None,
            BlockedLayout=nothing, SliceLayout=nothing, NVMMADistributedLayout=nothing, DotOperandLayout=nothing,
            NVMMASharedLayout=SimpleNamespace(get_default_for=nothing),
        )  # fmt: skip
