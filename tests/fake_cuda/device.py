"""The device: what its operators are given, when copies happen, and when the host waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.fake_cuda.graph import GARBAGE, Graph, on_the_host
from tests.fake_cuda.operators import EMULATED, Operator
from tests.fake_cuda.tensors import DeviceTensor, changed, has_mask, leaves_of, raw_of, tensors_in, without_device

_COPIES = ("aten::copy_", "aten::_to_copy", "aten::to.")
_WAITING = {  # their results depend on data, so the host waits for the device
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal", "aten::allclose",
    "aten::masked_select", "aten::unique_dim", "aten::_unique2", "aten::repeat_interleave.Tensor",
}  # fmt: skip


class _Copy(NamedTuple):
    """A copy between the device and pinned memory that is under way."""

    position: int  # on the time line of the device
    pinned: torch.Tensor
    content: torch.Tensor


class Event:
    def __init__(self, device: FakeCuda) -> None:
        self._device = device
        self._position = 0

    def record(self) -> None:
        self._position = self._device.next_position()

    def synchronize(self) -> None:
        self._device.wait("Event.synchronize", self._position)


class Stream:
    """The stream of everything, or one beside it, whose kernels run when the former waits for them: as late as they
    may. Each device has a class of its own, as torch has a class and no function.
    """

    device: FakeCuda

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seen = -1  # launches that it has waited for

    def wait_stream(self, _other: Stream) -> None:
        self.seen = self.device.num_launches
        if self is self.device.stream:
            self.device.join()


class FakeCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The device. While it is active, torch's operators go through it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: Counter[str] = Counter()  # of the host for the device, by what made it wait
        self.pageable: Counter[str] = Counter()  # copies from memory that is not pinned, by operator
        self.num_launches = 0
        self.stream_type = type("Stream", (Stream,), {"device": self})
        self.stream: Stream = self.stream_type()
        self._graph: Graph | None = None  # being captured
        self._is_beside = False
        self._beside: list[Callable[[], object]] = []  # launches of streams beside that were not waited for
        self._pinned: dict[int, torch.Tensor] = {}  # by address; kept, so that nothing else gets the address
        self._arriving: list[_Copy] = []
        self._leaving: list[_Copy] = []
        self._position = 0

    def next_position(self) -> int:
        self._position += 1
        return self._position

    def forget_counts(self) -> None:
        self.waits.clear()
        self.pageable.clear()

    def wait(self, reason: str, position: int | None = None) -> None:
        """Let everything up to ``position``, or everything, have happened."""
        self._refuse_in_graph(reason)
        self.waits[reason] += 1
        limit = self.next_position() if position is None else position
        with on_the_host():
            for copy in self._leaving:
                is_whole = copy.position > limit or torch.equal(copy.pinned, copy.content)
                assert is_whole, "pinned memory changed before it was copied to the device"
            for copy in self._arriving:
                if copy.position <= limit:
                    copy.pinned.copy_(copy.content)
        self._leaving = [copy for copy in self._leaving if copy.position > limit]
        self._arriving = [copy for copy in self._arriving if copy.position > limit]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.name()
        if name == "aten::is_pinned":
            return self._is_pinned(args[0])
        if name in ("aten::pin_memory", "aten::_pin_memory"):
            return self._pin(args[0].clone())
        is_pinned = bool(kwargs.pop("pin_memory", None))
        place = next((x for x in leaves_of((args, kwargs)) if isinstance(x, torch.device)), None)
        operands = tensors_in((args, kwargs))
        on_device = any(isinstance(x, DeviceTensor) for x in operands)
        if place is not None:
            args, kwargs = without_device(args), without_device(kwargs)
        if name.startswith(_COPIES):
            return self._copy(func, args, kwargs, place)
        if on_device and any(not isinstance(x, DeviceTensor) and x.dim() > 0 for x in operands):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, found cuda:0 and cpu")
        if on_device and (name in _WAITING or (name.startswith("aten::index") and has_mask(args))):
            self.wait(name)
        if on_device if place is None else place.type == "cuda":
            return self._launch(EMULATED.get(name, func), args, kwargs)
        result = func(*raw_of(args), **raw_of(kwargs))
        return self._pin(result) if is_pinned else result

    def launch_kernel(self, run: Operator, kernel: Any, *args: Any, **kwargs: Any) -> None:
        """Launch a Triton kernel, which is interpreted by ``run``."""
        if any(not isinstance(x, DeviceTensor) for x in tensors_in((args, list(kwargs.values())))):
            raise ValueError(f"pointer argument of {kernel.fn.__name__} cannot be accessed from Triton (cpu tensor?)")

        def interpret(*args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                run(kernel, *args, **kwargs)

        def launch() -> None:
            with _disable_current_modes():
                self._launch(interpret, args, kwargs)

        if self._is_beside:
            self._beside.append(launch)
        else:
            launch()

    @contextmanager
    def beside(self, stream: Stream) -> Iterator[None]:
        """What ``torch.cuda.stream`` does. Only kernels may be launched to a stream beside."""
        assert stream.seen == self.num_launches, "a stream has not waited for what was launched before"
        self._is_beside = True
        try:
            yield
        finally:
            self._is_beside = False

    def join(self) -> None:
        """Run what streams beside have been given."""
        launches, self._beside = self._beside, []
        for launch in launches:
            launch()

    @property
    def is_capturing(self) -> bool:
        return self._graph is not None

    @contextmanager
    def capture(self, graph: Graph, **_: Any) -> Iterator[None]:
        """What ``torch.cuda.graph`` does."""
        self.wait("a capture begins")
        self._graph = graph
        try:
            yield
            assert not self._beside, "a capture ends with unjoined work"
        finally:
            self._graph = None
            graph.end()

    def _launch(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        self.num_launches += 1
        raw_args, raw_kwargs, graph = raw_of(args), raw_of(kwargs), self._graph
        if graph is None:
            result = operator(*raw_args, **raw_kwargs)
        else:
            result = graph.launch(operator, raw_args, raw_kwargs)
        known = {id(x.raw): x for x in tensors_in((args, kwargs)) if isinstance(x, DeviceTensor)}

        def on_device(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return known[id(leaf)] if id(leaf) in known else DeviceTensor(leaf)

        return changed(result, on_device)

    def _copy(self, func: Any, args: Any, kwargs: Any, place: torch.device | None) -> Any:
        """``copy_`` and the operators behind ``to``."""
        is_in_place = func.name() == "aten::copy_"
        source, target = (args[1], args[0]) if is_in_place else (args[0], None)
        is_async = bool(kwargs.get("non_blocking") or (is_in_place and len(args) > 2 and args[2]))
        leads_to_device = isinstance(target if is_in_place else source, DeviceTensor)
        if place is not None:
            leads_to_device = place.type == "cuda"
        if isinstance(source, DeviceTensor) and not leads_to_device:
            if is_async and target is not None and self._is_pinned(target):
                self._refuse_in_graph("a copy to the host")
                self._arriving.append(_Copy(self.next_position(), target, source.raw.to(target.dtype).clone()))
                return target.fill_(GARBAGE)
            self.wait(f"{func.name()} to the host")
            return (
                func(*raw_of(args), **raw_of(kwargs)) if is_in_place else func(*raw_of(args), **raw_of(kwargs)).clone()
            )
        if leads_to_device and not isinstance(source, DeviceTensor) and source.dim() > 0:
            self._note_upload(func.name(), source, is_async=is_async)
            return self._launch(func if is_in_place else lambda *a, **k: func(*a, **k).clone(), args, kwargs)
        return self._launch(func, args, kwargs) if leads_to_device else func(*args, **kwargs)

    def _note_upload(self, name: str, source: torch.Tensor, *, is_async: bool) -> None:
        self._refuse_in_graph(f"{name} from the host")
        if not self._is_pinned(source):
            self.pageable[name] += 1
        elif is_async:
            self._leaving.append(_Copy(self.next_position(), source, source.clone()))
        else:
            self.wait(f"{name} from the host")

    def _refuse_in_graph(self, what: str) -> None:
        if self._graph is not None:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned
