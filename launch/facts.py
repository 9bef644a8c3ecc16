"""What a bug report should contain: versions, machine, tokenizer and effective config."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from ..protocol.codec import VERSION
from ..protocol.run_dir import CONFIG_FILE
from ..protocol.tokenizer_files import load_facts, load_tokenizer_json

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pyzmq", "msgpack", "numpy")
# Features that matrix kernels use; the rest of /proc/cpuinfo is not relevant here.
CPU_FEATURES = (
    "avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni avx512_bf16 avx512_fp16 avx_vnni amx_tile amx_int8 amx_bf16"
    " asimd asimddp bf16 i8mm sve sve2"
)


def versions() -> dict[str, str]:
    """Versions of this package, its protocol, Python and the main libraries in this process's environment."""
    found = {"triptych": __version__, "protocol": str(VERSION), "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def machine() -> dict[str, Any]:
    """The computer, as far as Linux describes it."""
    cpu = _cpu_facts()
    features = (cpu.get("flags") or cpu.get("Features") or "").split()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu.get("model name", "unknown"),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_features": [name for name in CPU_FEATURES.split() if name in features],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": sorted(_gpu_names()),
    }


def tokenizer(run_dir: Path) -> dict[str, Any]:
    """The tokenizer exported by a pipeline; its id depends only on the content of its file."""
    facts = load_facts(run_dir)
    if facts is None:
        return {}
    return {
        "id": hashlib.sha256(load_tokenizer_json(run_dir).encode()).hexdigest()[:16],
        "vocab_size": facts.vocab_size,
        "chat_template": facts.chat_template is not None,
        "special_tokens": facts.special_tokens,
    }


def config(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The config that a pipeline was started with."""
    found: dict[str, dict[str, Any]] = json.loads((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    return found


def _cpu_facts() -> dict[str, str]:
    """Of the first processor, assuming that all are alike."""
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
        pairs = (line.partition(":") for line in first.splitlines())
        return {name.strip(): value.strip() for name, _, value in pairs}
    return {}


def _gpu_names() -> list[str]:
    names = []
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        with suppress(OSError):
            names += [line[6:].strip() for line in file.read_text().splitlines() if line.startswith("Model:")]
    return names
