"""Whether Triton kernels run on a device, by which version, and on how many processors."""

from __future__ import annotations

from functools import cache

import torch


def why_no_triton(device: torch.device) -> str | None:
    """Why they do not, or None if they do. On a CPU they are interpreted, which is meant for tests."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed"
    if triton.knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return f"Triton compiles nothing for {device}"
    try:
        # Compiles a C extension, as each start does that finds none in the cache.
        _ = triton.runtime.driver.active
    except Exception as error:  # no compiler, no headers, no folder to write to: each version raises what it likes
        needs = "a C compiler, the headers of Python, and a writable TRITON_CACHE_DIR"
        return f"Triton, which needs {needs}, failed to start: {type(error).__name__}: {error}"
    return None


def triton_version() -> str:
    import triton  # not available for every device

    return str(triton.__version__)


@cache
def has_compiled_kernels(device: torch.device) -> bool:
    """Whether they run there as fast as they are meant to, and not interpreted. Each step asks, so it is kept."""
    if device.type != "cuda" or why_no_triton(device) is not None:
        return False
    import triton

    return not triton.knobs.runtime.interpret


def is_hopper(device: torch.device) -> bool:
    """Whether kernels that are compiled for this architecture alone run there."""
    return (
        has_compiled_kernels(device)
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def num_processors(device: torch.device) -> int:
    """The multiprocessors of a GPU; a few for the interpreter on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
