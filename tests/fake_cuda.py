"""A CUDA device without a GPU: it computes on the CPU, and refuses what a GPU would refuse.

Tensors on the device wrap CPU tensors. What torch itself checks is checked by torch. The device adds:

* Operators whose operands are on different devices fail, as do Triton kernels that get a host tensor. So does an index
  on the host, which a GPU would accept, but copy at every step.
* A capture fails if the host waits for the device in it, or copies to or from the host. A replay launches what was
  captured, with the numbers and addresses of the capture; other memory of the graph holds garbage before.
* Asynchronous copies happen as late as they may. Pinned memory that is copied to holds garbage until an event recorded
  after the copy has been waited for; pinned memory that is copied from must not change before.

It counts how often the host waits for the device, and copies from memory that is not pinned, which wait in part.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>)
}
"""
MEMORY_BYTES = 4 << 30
_GARBAGE = 77
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::to.")
_WAITING = {  # their results depend on data, so the host waits for the device
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal", "aten::allclose",
    "aten::masked_select", "aten::unique_dim", "aten::_unique2", "aten::repeat_interleave.Tensor",
}  # fmt: skip
Operator = Callable[..., Any]


class DeviceTensor(torch.Tensor):
    """A tensor on the device. ``raw`` has its numbers; the ``raw`` of a view shares memory with that of its base."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> DeviceTensor:
        with torch.inference_mode(False):  # else no view of a tensor from outside could be made inside
            tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
                device=torch.device("cuda:0"),
            )  # fmt: skip
        tensor.raw = raw
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.raw!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do in Python what torch does with device tensors in C++, below the modes that see operators."""
        if func is torch.Tensor.tolist:
            return args[0].cpu().tolist()
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            sent = tuple(torch.tensor(x, dtype=torch.int64).to("cuda") if isinstance(x, list) else x for x in index)
            args = (args[0], sent, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} without the device")


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


class Graph:
    """What was launched during a capture. To find the shapes of results, a capture computes once and takes it back."""

    def __init__(self) -> None:
        self._launches: list[Callable[[], object]] = []
        self._owned: dict[int, torch.Tensor] = {}  # memory of the graph itself, by address
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # other memory, as it was

    def launch(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        given = [x.untyped_storage() for x in _tensors((args, kwargs))]
        for storage in given:
            if storage.data_ptr() not in self._owned:
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))  # type: ignore[no-untyped-call]
        result = operator(*args, **kwargs)
        results, addresses = _tensors(result), {storage.data_ptr() for storage in given}
        fresh = {x.untyped_storage().data_ptr(): x for x in results}
        self._owned |= {address: x for address, x in fresh.items() if address not in addresses}

        def launch_again() -> None:
            for old, new in zip(results, _tensors(operator(*args, **kwargs)), strict=True):
                if old is not new:
                    old.copy_(new)

        self._launches.append(launch_again)
        return result

    def end(self) -> None:
        for storage, content in self._before.values():
            storage.copy_(content)
        self._before.clear()

    def replay(self) -> None:
        with _on_the_host():
            for tensor in self._owned.values():  # other graphs of the pool have used it
                tensor.fill_(float("nan") if tensor.is_floating_point() else _GARBAGE)
            for launch in self._launches:
                launch()


class FakeCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The device. While it is active, torch's operators go through it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: Counter[str] = Counter()  # of the host for the device, by what made it wait
        self.pageable: Counter[str] = Counter()  # copies from memory that is not pinned, by operator
        self._graph: Graph | None = None  # being captured
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
        with _on_the_host():
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
        place = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.device)), None)
        operands = _tensors((args, kwargs))
        on_device = any(isinstance(x, DeviceTensor) for x in operands)
        args, kwargs = _without_device(args), _without_device(kwargs)
        if name.startswith(_COPIES):
            return self._copy(func, args, kwargs, place)
        if on_device and any(not isinstance(x, DeviceTensor) and x.dim() > 0 for x in operands):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, found cuda:0 and cpu")
        if on_device and (name in _WAITING or (name.startswith("aten::index") and _has_mask(args))):
            self.wait(name)
        if on_device if place is None else place.type == "cuda":
            return self._launch(_EMULATED.get(name, func), args, kwargs)
        result = func(*_raw(args), **_raw(kwargs))
        return self._pin(result) if is_pinned else result

    def launch_kernel(self, run: Operator, kernel: Any, *args: Any, **kwargs: Any) -> None:
        """Launch a Triton kernel, which is interpreted by ``run``."""
        if any(not isinstance(x, DeviceTensor) for x in _tensors((args, list(kwargs.values())))):
            raise ValueError(f"pointer argument of {kernel.fn.__name__} cannot be accessed from Triton (cpu tensor?)")

        def interpret(*args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                run(kernel, *args, **kwargs)

        with _disable_current_modes():
            self._launch(interpret, args, kwargs)

    @contextmanager
    def capture(self, graph: Graph, **_: Any) -> Iterator[None]:
        """What ``torch.cuda.graph`` does."""
        self.wait("a capture begins")
        self._graph = graph
        try:
            yield
        finally:
            self._graph = None
            graph.end()

    def _launch(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        raw_args, raw_kwargs, graph = _raw(args), _raw(kwargs), self._graph
        if graph is None:
            result = operator(*raw_args, **raw_kwargs)
        else:
            result = graph.launch(operator, raw_args, raw_kwargs)
        known = {id(x.raw): x for x in tree_leaves((args, kwargs)) if isinstance(x, DeviceTensor)}
        return tree_map_only(torch.Tensor, lambda x: known[id(x)] if id(x) in known else DeviceTensor(x), result)

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
                return target.fill_(_GARBAGE)
            self.wait(f"{func.name()} to the host")
            return func(*_raw(args), **_raw(kwargs)) if is_in_place else func(*_raw(args), **_raw(kwargs)).clone()
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


@contextmanager
def fake_cuda(patch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Let torch have a CUDA device."""
    _register_guard()
    device, kernel_run = FakeCuda(), InterpretedFunction.run
    for name, value in _functions(device).items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(InterpreterBuilder, "create_dot", _dot_of(InterpreterBuilder.create_dot))
    patch.setattr(InterpreterBuilder, "create_si_to_fp", _float_of(InterpreterBuilder.create_si_to_fp))
    patch.setattr(InterpretedFunction, "run", lambda kernel, *a, **k: device.launch_kernel(kernel_run, kernel, *a, **k))
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with _FillingMode(), device:
            yield device
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def _functions(device: FakeCuda) -> dict[str, Any]:
    """The functions and classes of ``torch.cuda``."""
    properties = SimpleNamespace(multi_processor_count=8, name="fake", total_memory=MEMORY_BYTES, major=9, minor=0)
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "synchronize": lambda _device=None: device.wait("synchronize"),
        "Event": lambda **_: Event(device),
        "CUDAGraph": Graph,
        "graph": device.capture,
        "graph_pool_handle": object,
        "Stream": object,
        "current_stream": lambda: None,
        "mem_get_info": lambda _device=None: (MEMORY_BYTES // 2, MEMORY_BYTES),
        "memory_reserved": lambda _device=None: 0,
        "max_memory_reserved": lambda _device=None: 1 << 20,
        "reset_peak_memory_stats": lambda _device=None: None,
        "empty_cache": lambda: None,
        "get_device_capability": lambda _device=None: (9, 0),
        "get_device_name": lambda _device=None: "fake",
        "get_device_properties": lambda _device=None: properties,
    }


class _FillingMode(TorchFunctionMode):
    """``torch.tensor`` fills tensors below all modes that see operators, so they are sent to the device afterwards."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        return func(*args, **kwargs)


@cache
def _register_guard() -> ctypes.CDLL:
    """Let torch switch to a CUDA device, which its Python bindings do around every operator."""
    home = Path(torch.__file__).parent
    command = ["c++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{home}/include", f"-L{home}/lib", "-xc++", "-"]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "guard.so")
        subprocess.run([*command, "-lc10", "-o", library], input=_GUARD, text=True, check=True)
        return ctypes.CDLL(str(library))


@contextmanager
def _on_the_host() -> Iterator[None]:
    """Operators are the host's own, and may write to any tensor."""
    with torch.inference_mode(), _disable_current_modes():
        yield


def _dot_of(create_dot: Operator) -> Operator:
    """The interpreter's products, but of bfloat16 too, whose bits it would multiply as integers."""

    def widened(factor: Any) -> Any:
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        return TensorHandle((factor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    return lambda self, a, b, *rest: create_dot(self, widened(a), widened(b), *rest)


def _float_of(convert: Operator) -> Operator:
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


_EMULATED: dict[str, Operator] = {  # which a CPU does not have
    "aten::_scaled_mm": _scaled_mm,
    "aten::histc": lambda x, *args, **kwargs: torch.histc(x.float(), *args, **kwargs).to(x.dtype),
}


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _raw(tree: Any) -> Any:
    return tree_map_only(DeviceTensor, lambda tensor: tensor.raw, tree)


def _without_device(tree: Any) -> Any:
    """The arguments with the CPU in place of the device."""
    return tree_map_only(torch.device, lambda device: torch.device("cpu") if device.type == "cuda" else device, tree)


def _has_mask(args: Any) -> bool:
    return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
