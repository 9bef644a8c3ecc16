"""Proves and measures the GPU path on the machine it runs on: one command, a short table last, everything as JSON.

    python benchmarks/gpu_check.py            # one GPU, below eight minutes, no network
    python benchmarks/gpu_check.py --dry-run  # any machine: the same code on tiny shapes and Triton's interpreter

Each part runs in a process of its own with a budget of time: one that fails or hangs is reported and the rest goes on.
Random checkpoints are made in a folder that is removed at the end. The JSON file is written after every part.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


class Part(NamedTuple):
    """A function ``(setting, note)`` of a module in ``benchmarks/gpu``."""

    name: str
    module: str
    budget_s: float


# In the order of what is least dispensable: what no time is left for is named in the table.
PARTS = [
    Part("limits", "kernels", 40),
    Part("attention", "kernels", 70),
    Part("small", "models", 100),
    Part("large", "models", 150),
    Part("numerics", "numerics", 130),
    Part("peers_small", "peers", 60),
    Part("deterministic", "models", 90),
    Part("processes", "processes", 60),
    Part("peers_large", "peers", 60),
    Part("fp8", "models", 60),
]
LEAST_S = 15.0  # a part that has less is not begun


class Row(NamedTuple):
    """A line of the table: where in the report its value is, and what it should be."""

    what: str
    path: str
    goal: str = ""
    is_met: Callable[[Any], bool] | None = None


def at_least(limit: float) -> Callable[[Any], bool]:
    return lambda value: value >= limit


def at_most(limit: float) -> Callable[[Any], bool]:
    return lambda value: value <= limit


ROWS = [
    Row("copy bandwidth, bytes/s", "limits.copy_bytes_per_s"),
    Row("bf16 matrix product, flop/s", "limits.matmul_flop_per_s"),
    Row("tests on the device pass", "numerics.is_green", "yes", bool),
    Row("decode attention of copy, 64 x 2k, page 64", "attention.decode_page_64.default", ">= 0.80", at_least(0.8)),
    Row("  best way tried", "attention.decode_page_64.best_share"),
    Row("  which", "attention.decode_page_64.best"),
    Row("chunk attention of product, 2048", "attention.chunk_fresh.default", ">= 0.50", at_least(0.5)),
    Row("  best way tried", "attention.chunk_fresh.best_share"),
    Row("0.6B, 256 requests, output tokens/s", "small.throughput.output_tokens_per_s", ">= 20000", at_least(20_000)),
    Row("0.6B, batch 32: idle share of the GPU", "small.batch_32.idle_share", "< 0.02", at_most(0.02)),
    Row("  without overlap", "small.batch_32_serial.idle_share"),
    Row("0.6B, batch 32, output tokens/s", "small.batch_32.output_tokens_per_s"),
    Row("  without graphs", "small.batch_32_without_graphs.output_tokens_per_s"),
    Row("overlapped tokens equal serial ones", "small.overlapped_equals_serial", "yes", bool),
    Row("8B, 256 x 1024/1024, output tokens/s", "large.throughput.output_tokens_per_s", ">= 8500", at_least(8500)),
    Row("  of the roofline of the run", "large.throughput.of_roofline", ">= 0.70", at_least(0.7)),
    Row("8B, batch 1, of the bandwidth", "large.batch_1.of_bandwidth", ">= 0.85", at_least(0.85)),
    Row("8B, prefill of the product", "large.prefill_of_matmul"),
    Row("8B --deterministic, output tokens/s", "deterministic.throughput.output_tokens_per_s", ">= 6000",
        at_least(6000)),
    Row("  alone equals together", "deterministic.equal_alone_and_together", "yes", bool),
    Row("0.6B over continuous batching (sdpa)", "ratios.small", ">= 3", at_least(3)),
    Row("8B over continuous batching (sdpa)", "ratios.large", ">= 3", at_least(3)),
    Row("three processes: throughput against one", "processes.batch_32.throughput_ratio", ">= 0.98", at_least(0.98)),
    Row("three processes: added inter-token, ms", "processes.batch_32.added_itl_ms", "<= 0.3", at_most(0.3)),
    Row("8B fp8, batch 1, tokens/s", "fp8.batch_1.tokens_per_s"),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, by Triton's interpreter")
    parser.add_argument("--parts", nargs="*", default=[part.name for part in PARTS], help="by default all")
    parser.add_argument("--minutes", type=float, default=7.8, help="in which it ends")
    parser.add_argument("--out", type=Path, help="JSON file; by default beside this script, named by device and date")
    parser.add_argument("--run-part", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_part:
        run_part(*arguments.run_part, is_dry=arguments.dry_run)
        return
    unknown = sorted(set(arguments.parts) - {part.name for part in PARTS})
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}; known are: {', '.join(part.name for part in PARTS)}")
    if not arguments.dry_run and not has_gpu():
        print(json.dumps({"what": "gpu_check", "skipped": "torch sees no CUDA device; --dry-run needs none"}))
        return
    check(arguments)


def has_gpu() -> bool:
    """Asked in another process, so that this one takes nothing of the device."""
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code]).returncode == 0


def check(arguments: argparse.Namespace) -> None:
    end = time.monotonic() + 60 * arguments.minutes
    report: dict[str, Any] = {
        "what": "gpu_check",
        "is_dry": arguments.dry_run,
        "date": str(date.today()),
        "seconds": {},
    }
    report |= about()
    folder = Path(tempfile.mkdtemp(prefix="triptych-gpu-", dir=roomiest()))
    try:
        for part in PARTS:
            if part.name not in arguments.parts:
                continue
            start = time.monotonic()
            report[part.name] = attempt(part, folder, end - start, is_dry=arguments.dry_run)
            report["seconds"][part.name] = round(time.monotonic() - start, 1)
            report["ratios"] = ratios(report)
            write(report, arguments.out)
            print(
                f"{part.name}: {report['seconds'][part.name]} s, {report[part.name].get('error', 'done')}", flush=True
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(report))


def attempt(part: Part, folder: Path, left_s: float, *, is_dry: bool) -> dict[str, Any]:
    """What the part found, with ``error`` where it did not come to its end."""
    if left_s < LEAST_S:
        return {"error": "no time was left"}
    env = {**os.environ, "TRIPTYCH_BENCH_DIR": str(folder), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    if is_dry:
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, str(Path(__file__)), "--run-part", part.name, str(folder)]
    log = folder / f"{part.name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command + ["--dry-run"] * is_dry, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        error = wait(process, min(part.budget_s * (4 if is_dry else 1), left_s))
    file = folder / f"{part.name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if error:
        found["error"] = error
        found["log"] = log.read_text(errors="replace")[-3000:]
    return found


def wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """Why the part did not come to its end, or nothing. Whatever it started ends with it."""
    try:
        code = process.wait(limit_s)
        return f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_part(name: str, folder: str, *, is_dry: bool) -> None:
    part = next(part for part in PARTS if part.name == name)
    from benchmarks.gpu.setting import Notes, Setting

    setting = Setting(Path(folder), is_dry)
    note = Notes(Path(folder, f"{name}.json"))
    start = time.monotonic()
    getattr(importlib.import_module(f"benchmarks.gpu.{part.module}"), name)(setting, note)
    note("seconds", round(time.monotonic() - start, 1))


def about() -> dict[str, Any]:
    from benchmarks.report import environment

    packages = [name for name in ("torch", "transformers", "triton", "pyzmq") if is_installed(name)]
    return environment(*packages)


def is_installed(name: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def roomiest() -> str:
    """A folder for checkpoints: memory if there is enough of it, since weights are read from there several times."""
    memory = "/dev/shm"
    if os.path.isdir(memory) and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 40 << 30:
        return memory
    return tempfile.gettempdir()


def ratios(report: dict[str, Any]) -> dict[str, float]:
    """Our throughput over that of transformers' continuous batching, on the same requests."""
    found = {}
    for name in ("small", "large"):
        ours = lookup(report, f"{name}.peer_workload.output_tokens_per_s")
        theirs = lookup(report, f"peers_{name}.sdpa continuous_batching")
        if isinstance(ours, float) and isinstance(theirs, float):
            found[name] = round(ours / theirs, 2)
    return found


def lookup(report: dict[str, Any], path: str) -> Any:
    value: Any = report
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def table(report: dict[str, Any]) -> str:
    lines = [f"{'':44} {'value':>14} {'goal':>9}"]
    for row in ROWS:
        value = lookup(report, row.path)
        part = row.path.split(".")[0]
        if value is None and part in report.get("seconds", {}) | {"ratios": 0}:
            shown = lookup(report, f"{part}.error") or "-"
        elif value is None:
            shown = "not run"
        else:
            shown = {True: "yes", False: "NO"}[value] if isinstance(value, bool) else shorten(value)
        is_judged = value is not None and row.is_met is not None
        verdict = "" if not is_judged else "  met" if row.is_met is not None and row.is_met(value) else "  MISSED"
        lines.append(f"{row.what:44} {shown:>14} {row.goal:>9}{verdict}")
    return "\n".join(lines)


def shorten(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(report: dict[str, Any], out: Path | None) -> None:
    file = out or default_file(report)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(file)


def default_file(report: dict[str, Any]) -> Path:
    device = lookup(report, "limits.device") or ("dry-run" if report["is_dry"] else "unknown-gpu")
    name = "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())
    return Path(__file__).with_name(f"gpu_check_{name}_{report['date'].replace('-', '')[:6]}.json")


if __name__ == "__main__":
    main()
