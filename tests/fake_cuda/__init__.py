"""A CUDA device without a GPU: it computes on the CPU, and refuses what a GPU would refuse.

Tensors on the device wrap CPU tensors. What torch itself checks is checked by torch. The device adds:

* Operators whose operands are on different devices fail, as do Triton kernels that get a host tensor. So does an index
  on the host, which a GPU would accept, but copy at every step.
* A capture fails if the host waits for the device in it, or copies to or from the host. A replay launches what was
  captured, with the numbers and addresses of the capture; other memory of the graph holds garbage before.
* Kernels on a stream beside run when they are waited for, and a capture fails if they are not.
* Asynchronous copies happen as late as they may. Pinned memory that is copied to holds garbage until an event recorded
  after the copy has been waited for; pinned memory that is copied from must not change before.

It counts how often the host waits for the device, and copies from memory that is not pinned, which wait in part.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from tests.fake_cuda.device import Event, FakeCuda
from tests.fake_cuda.graph import Graph
from tests.fake_cuda.operators import dot_of, float_of
from triptych.workers.execute.user_cache import cache_folder, making

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>)
}
"""
MEMORY_BYTES = 4 << 30


@contextmanager
def fake_cuda(patch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Let torch have a CUDA device."""
    _register_guard()
    device, kernel_run = FakeCuda(), InterpretedFunction.run
    for name, value in _functions(device).items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(InterpreterBuilder, "create_dot", dot_of(InterpreterBuilder.create_dot))
    patch.setattr(InterpreterBuilder, "create_si_to_fp", float_of(InterpreterBuilder.create_si_to_fp))
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
        "Stream": device.stream_type,
        "stream": device.beside,
        "current_stream": lambda *_: device.stream,
        "set_stream": lambda _stream: None,
        "is_current_stream_capturing": lambda: device.is_capturing,
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
    """Let torch switch to a CUDA device, which its Python bindings do around every operator.

    The guard is compiled once for each torch, in the cache: it takes longer than most tests that use it.
    """
    home = Path(torch.__file__).parent
    command = ["c++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{home}/include", f"-L{home}/lib", "-xc++", "-"]
    identity = hashlib.sha256("\0".join([*command, _GUARD, torch.__version__]).encode()).hexdigest()[:16]
    library = cache_folder() / "fake_cuda" / f"guard-{identity}.so"
    with making(library) as scratch:
        if scratch is not None:
            made = scratch / library.name
            subprocess.run([*command, "-lc10", "-o", made], input=_GUARD, text=True, check=True)
            made.replace(library)
    return ctypes.CDLL(str(library))
