"""Whether Triton kernels run on a device."""

from __future__ import annotations

import torch


def why_no_triton(device: torch.device) -> str | None:
    """Why they do not, or None if they do. On a CPU they are interpreted, which is meant for tests."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed"
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"Triton compiles nothing for {device}"
    return None
