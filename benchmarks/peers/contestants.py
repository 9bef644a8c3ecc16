"""The contestants: engines installed below the peers' folder, each in a child process that receives commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.load import share_priority

CHILD = Path(__file__).with_name("child.py")
OURS = "triptych"
VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "3",  # GiB
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine in one format, or the reason why it does not take part."""

    engine: str  # a module of engines/
    form: str
    python: Path
    environment: dict[str, str]
    why_not: str | None = None

    @property
    def name(self) -> str:
        return f"{self.engine} {self.form}"


def find_contestants(peers: Path | None, model: Path, forms: list[str]) -> list[Contestant]:
    """Triptych in each of ``forms``, and every known peer; README.md describes the layout of ``peers``.

    Peers take part in four bits if Triptych does.
    """
    found = [Contestant(OURS, form, Path(sys.executable), {}) for form in forms]
    in_four_bits = [
        ("openvino", "int4", "openvino-int4/openvino_model.xml"),
        ("llama_cpp", "q4_0", "q4_0.gguf"),
    ]
    return found + [_find(peers, model, *peer) for peer in (
        ("vllm", "bf16", None),
        ("openvino", "bf16", "openvino-fp16/openvino_model.xml"),
        ("openvino", "int8", "openvino-int8/openvino_model.xml"),
        ("llama_cpp", "bf16", "bf16.gguf"),
        ("llama_cpp", "q8_0", "q8_0.gguf"),
        *(in_four_bits if "int4" in forms else ()),
    )]  # fmt: skip


def _find(peers: Path | None, model: Path, engine: str, form: str, converted: str | None) -> Contestant:
    if peers is None:
        return Contestant(engine, form, Path(), {}, "no folder of peers was named")
    python, environment = peers / engine / "bin" / "python", {}
    needed = [python]
    if engine == "llama_cpp":
        python = Path(sys.executable)  # its adapter only needs the standard library
        environment["LLAMA_SERVER"] = str(peers / engine / "llama-server")
        needed = [peers / engine / "llama-server"]
    if engine == "vllm":  # its best setting, see its manual
        libraries = [peers / engine / "lib" / name for name in ("libiomp5.so", "libtcmalloc_minimal.so.4")]
        environment |= VLLM
        environment["LD_PRELOAD"] = ":".join(str(path) for path in libraries if path.exists())
    if converted is not None:
        needed.append(model.parent / f"{model.name}.{converted}")
    missing = next((path for path in needed if not path.exists()), None)
    return Contestant(engine, form, python, environment, None if missing is None else f"there is no {missing}")


def turns(contestants: list[Contestant], repeats: int) -> Iterator[tuple[int, Contestant]]:
    """``repeats`` rounds of all contestants, each round beginning with another one: (round, contestant)."""
    for run in range(repeats):
        first = run % len(contestants)
        for contestant in contestants[first:] + contestants[:first]:
            yield run, contestant


def environment_of(contestant: Contestant, threads: int) -> dict[str, str]:
    """The environment of its process, which computes with ``threads`` threads."""
    of_all = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
    of_vllm = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}  # the others do not know it
    return {**of_vllm, **os.environ, **of_all, **contestant.environment}


class Running:
    """A contestant in a process, which ends with the context."""

    def __init__(self, contestant: Contestant, model: Path, threads: int, log: Path) -> None:
        self.contestant = contestant
        command = [str(contestant.python), str(CHILD), contestant.engine, contestant.form, str(model), str(threads)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=environment_of(contestant, threads),
            )

    def load(self) -> dict[str, Any]:
        """Its description once the model is loaded, or {"error": ...}."""
        facts = self._answer()
        share_priority(self._process.pid)
        return facts

    def run(self, workload: str, run: int, requests_per_s: float) -> dict[str, Any]:
        """The result of ``measure`` in child.py, or {"error": ...}."""
        assert self._process.stdin is not None
        order = {"workload": workload, "run": run, "requests_per_s": requests_per_s}
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"error": "it ended before"}
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"it ended with {self._process.wait()}"}
        return answer

    def __enter__(self) -> Running:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
