"""The machine's limits, measured beside the engines: a workload's share of them shows what is left to gain."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.report import best_of

SIZE = 2048  # of the matrices


class Limits:
    """``read_rate`` in bytes, ``bf16_rate`` and ``int8_rate`` in operations per second, with ``threads`` threads."""

    def __init__(self, folder: Path, threads: int) -> None:
        """``folder`` is for the compiled memory reader; without a C compiler torch reads, which is slower."""
        torch.set_num_threads(threads)
        self._threads = threads
        compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
        self._reader = None if compiler is None else folder / "bandwidth"
        if compiler is not None:
            source = Path(__file__).with_name("bandwidth.c")
            flags = ["-O3", "-march=native", "-pthread", str(source), "-o", str(self._reader)]
            subprocess.run([compiler, *flags], check=True)
        self._halves = torch.ones(SIZE, SIZE, dtype=torch.bfloat16)
        self._bytes = torch.ones(SIZE, SIZE, dtype=torch.int8)

    def measure(self) -> dict[str, float]:
        return {
            "read_rate": self._read_rate(),
            "bf16_rate": _product_rate(lambda: self._halves @ self._halves),
            "int8_rate": _product_rate(lambda: torch._int_mm(self._bytes, self._bytes)),
        }

    def _read_rate(self) -> float:
        if self._reader is not None:
            command = [str(self._reader), str(self._threads), "1024", "5"]
            return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        memory = torch.ones(1 << 27, dtype=torch.int64)
        return (1 << 30) / best_of(memory.max)


def _product_rate(multiply: Callable[[], object]) -> float:
    return 2 * SIZE**3 / best_of(multiply)
