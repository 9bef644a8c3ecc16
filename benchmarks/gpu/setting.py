"""Where a part runs, at what size, and how it measures times and records its results."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_models import SHAPES, make_checkpoint

Shape = dict[str, Any]
_PACKAGES = {"zmq": "pyzmq"}  # whose module has another name
_SLEEP_CYCLES = 1_000_000  # half a millisecond

_QWEN3_8B: Shape = {
    **SHAPES["qwen3-0.6b"],
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
_QWEN3_MOE_8B: Shape = {  # a quarter of Qwen3-30B-A3B: 12 of its layers
    **SHAPES["qwen3-moe-0.5b"],
    "hidden_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "head_dim": 128,
    "intermediate_size": 6144,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
_TINY: Shape = {
    **SHAPES["qwen3-0.6b"],
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 1024,
}
_TINY_MOE: Shape = {
    **_TINY,
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
_SHAPES = {**SHAPES, "qwen3-8b": _QWEN3_8B, "qwen3-moe-8b": _QWEN3_MOE_8B}


def require(*modules: str) -> None:
    """End the part with the names of the packages that are not installed."""
    missing = [_PACKAGES.get(name, name) for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"needs {', '.join(missing)}: not installed here")


def free_memory() -> None:
    """Free dropped objects on the device. A runner and its graphs refer to each other, so without a garbage collection
    the second of two models would find no memory beside the pages of the first.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Notes:
    """The results of a part, on disk as soon as they are known: a part that is cut short keeps what it has."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, Any] = {}

    def __call__(self, name: str, value: Any) -> None:
        self._found[name] = value
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._found))
        os.replace(part, self._file)


@dataclass(frozen=True, slots=True)
class Setting:
    """A GPU and real shapes, or a dry run: a CPU, tiny shapes, and Triton's interpreter."""

    folder: Path  # for checkpoints, and for results passed to later parts
    is_dry: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.is_dry else "cuda")

    def size(self, real: int, dry: int) -> int:
        return dry if self.is_dry else real

    def shape(self, name: str) -> Shape:
        if not self.is_dry:
            return _SHAPES[name]
        return _TINY_MOE if "num_experts" in _SHAPES[name] else _TINY

    def checkpoint(self, name: str) -> Path:
        """A random checkpoint of a real shape, made at the first call of all parts."""
        return make_checkpoint(self.folder / name, self.shape(name), device=str(self.device))

    def found(self, part: str) -> dict[str, Any]:
        """Results of another part; empty if it failed."""
        file = self.folder / f"{part}.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def seconds(self, function: Callable[[], object], *, repeats: int = 20) -> float:
        """The median time of a call, by the device's own clock."""
        for _ in range(self.size(3, 1)):
            function()
        return statistics.median(self._timed(function) for _ in range(self.size(repeats, 1)))

    def _timed(self, function: Callable[[], object]) -> float:
        if self.is_dry:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # Keep the device busy until the launches are queued: otherwise the host's time is measured, which is longer.
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        function()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
