"""Whether Triton kernels run on a device, and what is said if they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import HAS_GPU

pytest.importorskip("triton.backends.nvidia")

import triton
from triton.backends.nvidia import driver as nvidia

from triptych.workers.execute.kernels.support import why_no_triton


@pytest.mark.skipif(HAS_GPU, reason="Triton has started already")
def test_machine_without_a_c_compiler_is_found_before_weights_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(nvidia.CudaDriver, "is_active", staticmethod(lambda: True))
    monkeypatch.setattr(nvidia, "libcuda_dirs", list)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "Failed to find C compiler" in (why_no_triton(torch.device("cuda")) or "")
