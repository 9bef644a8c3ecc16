"""Compiles every Triton kernel for a Hopper GPU on a machine without one, through the functions that launch them.

Prints a JSON line for each compiled kernel: its name, its matrix instructions, how often its code prefetches from a
block table, its registers, stack and shared memory; of the kernel in Gluon also how many products it has, and how often
it waits for some.

    python -m tests.workers.execute.kernels.compile_for_gpu > tests/workers/execute/kernels/compiled_for_gpu.jsonl

keeps the lines for tests, which compile again only if a kernel has changed since: that takes 80 s of processor time.
The first line says of which sources and which Triton they are.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.workers.execute.kernels import launches

SOURCES = Path(__file__).parents[4] / "workers/execute/kernels"
RECORD = Path(__file__).with_name("compiled_for_gpu.jsonl")
HOPPER, AMPERE, ADA, TURING = 90, 80, 89, 75  # compute capabilities
OTHERS = {
    "workstation": ADA, "turing": TURING, "eight bits on ampere": AMPERE,
    "eight bits on a workstation": ADA, "eight bits on turing": TURING,
    "adapters on ampere": AMPERE, "adapters on a workstation": ADA, "adapters on turing": TURING,
}  # fmt: skip


class NoDevice:
    """The part of a Triton driver that compilation needs."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # compiled kernels are kept by device

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def origin() -> dict[str, str]:
    """What the compiled kernels depend on."""
    digest = hashlib.sha256()
    for file in (*sorted(SOURCES.glob("triton_*.py")), SOURCES / "sizes.py", Path(__file__), Path(launches.__file__)):
        digest.update(file.read_bytes())
    return {"sources": digest.hexdigest()[:16], "triton": triton.__version__}


def main() -> None:
    print(json.dumps(origin()), flush=True)
    knobs.compilation.disable_line_info = True  # it takes a tenth of the time, and the code is the same
    run = JITFunction.run
    parts: dict[str, Callable[[], None]] = {
        "every": launches.every, "products": launches.products, "experts": launches.expert_products,
        "steps": launches.many_steps, "workstation": launches.largest, "turing": launches.attention,
        "eight bits": launches.eight_bits,
        "eight bits on ampere": partial(launches.eight_bits_on, launches.AMPERE_BYTES),
        "eight bits on a workstation": partial(launches.eight_bits_on, launches.WORKSTATION_BYTES),
        "eight bits on turing": partial(launches.eight_bits_on, launches.TURING_BYTES, dtype=torch.float16),
        "adapters": launches.adapters, "adapters on ampere": launches.adapters,
        "adapters on a workstation": launches.adapters,
        "adapters on turing": partial(launches.adapters, dtypes=(torch.float16,)),
    }  # fmt: skip
    for part, launch in parts.items():
        driver.set_active(NoDevice(OTHERS.get(part, HOPPER)))
        JITFunction.run = compiling(run, part)
        launch()


def compiling(run: Callable[..., Any], part: str) -> Callable[..., None]:
    """Replaces ``JITFunction.run``: it launches nothing."""
    seen = set()

    def compile_only(self: Any, *args: Any, **options: Any) -> None:
        compiled = run(self, *args, **{**options, "warmup": True})
        if compiled.hash in seen:
            return
        seen.add(compiled.hash)
        ptx = compiled.asm["ptx"]
        products = sorted(set(re.findall(r"wgmma\.mma_async\S+|mma\.sync\S+", ptx)))
        lookups = len(re.findall(r"cp\.async.*0x4,", ptx))
        found = {"part": part, "kernel": self.__name__, "products": products, "lookups": lookups}
        if isinstance(self, GluonJITFunction):
            found |= overlap(compiled)
        print(json.dumps({**found, **resources(compiled)}), flush=True)

    return compile_only


def dump(compiled: Any, option: str) -> str:
    """What is known of its machine code."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, option, str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def overlap(compiled: Any) -> dict[str, int]:
    """Products, and waits for them: one for each if the assembler sees registers used that a product may still need."""
    found = {"num_products": r"\bHGMMA\.", "waits": r"\bWARPGROUP\.DEPBAR"}
    code = dump(compiled, "-sass")
    return {name: len(re.findall(pattern, code)) for name, pattern in found.items()}


def resources(compiled: Any) -> dict[str, int]:
    """Of a compiled kernel, read from its machine code."""
    report = dump(compiled, "--dump-resource-usage")
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", report))
    shared = compiled.metadata.shared
    assert shared <= launches.HOPPER_BYTES, f"{shared} bytes of shared memory, the limit is {launches.HOPPER_BYTES}"
    return {"registers": int(found["REG"]), "stack_bytes": int(found["STACK"]), "shared_bytes": shared}


if __name__ == "__main__":
    main()
