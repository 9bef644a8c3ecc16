"""Proves and measures the GPU path on the machine it runs on: one command, a short table last, everything as JSON.

    python benchmarks/gpu_check.py               # one GPU, below eight minutes, no network: kernels and the 0.6B shape
    python benchmarks/gpu_check.py --set large   # the same for the 8B shape
    python benchmarks/gpu_check.py --set adapters
    python benchmarks/gpu_check.py --set experts
    python benchmarks/gpu_check.py --set pages
    python benchmarks/gpu_check.py --set speculation
    python benchmarks/gpu_check.py --dry-run     # any machine: the same code on tiny shapes and Triton's interpreter

Each part runs in a separate process with a time budget: one that fails or hangs is reported, and the others run.
Random checkpoints are made in a folder that is removed at the end. The JSON file is written after every part, and keeps
earlier results of other parts. ``limits`` runs again whenever a part compares with it.
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
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu.table import lookup, table
from benchmarks.report import ROOT, environment


class Part(NamedTuple):
    """A function ``(setting, note)`` of a module in ``benchmarks/gpu``."""

    name: str
    module: str
    budget_s: float


LIMITS = Part("limits", "kernels", 30)  # of the device: most results are compared with them
BUDGET_S = 465.0  # of one call: below eight minutes
# The most important ones first. The budgets of a set add up to at most that of a call.
SETS = {
    "small": [
        LIMITS,
        Part("numerics", "numerics", 130),
        Part("small", "models", 75),
        Part("processes", "processes", 60),
        Part("recovery", "recovery", 75),
        Part("attention", "kernels", 55),
        Part("peers_small", "peers", 40),
    ],
    "large": [
        LIMITS,
        Part("large", "models", 165),
        Part("deterministic", "models", 135),
        Part("fp8", "models", 70),
        Part("peers_large", "peers", 65),
    ],
    "adapters": [
        LIMITS,
        Part("adapters", "adapters", 240),
    ],
    "experts": [
        LIMITS,
        Part("experts", "experts", 330),
    ],
    "pages": [
        LIMITS,
        Part("int8_pages", "models", 110),
        Part("loading", "loading", 75),
    ],
    "speculation": [
        LIMITS,
        Part("speculation", "speculation", 60),
        Part("speculation_large", "speculation", 120),
        Part("draft_equal", "speculation", 60),
        Part("draft_speed", "speculation", 100),
    ],
}
PARTS = list({part.name: part for parts in SETS.values() for part in parts}.values())
# With the results of ``limits`` in the same call.
COMPARED = {"attention", "small", "large", "deterministic", "fp8", "int8_pages", "adapters", "experts"}
NO_TIME = "no time was left"
STOPPED = "stopped"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, by Triton's interpreter")
    parser.add_argument("--set", choices=list(SETS), default="small", help="what runs unless --parts says so")
    parser.add_argument("--parts", nargs="*", help=f"some of: {', '.join(part.name for part in PARTS)}; may be none")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds in which it ends (%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file; by default beside this script, named by device and date")
    parser.add_argument("--add", type=Path, nargs="*", default=[], metavar="FILE", help="reports to add to this one")
    parser.add_argument("--run-part", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_part:
        run_part(*arguments.run_part, is_dry=arguments.dry_run)
        return
    unknown = sorted(set(arguments.parts or []) - {part.name for part in PARTS})
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}; known are: {', '.join(part.name for part in PARTS)}")
    end = time.monotonic() + arguments.budget_s
    device = "dry run" if arguments.dry_run else device_name()
    parts = choose(arguments.set, arguments.parts)
    if parts and device is None:
        print(json.dumps({"what": "gpu_check", "skipped": "torch sees no CUDA device; --dry-run needs none"}))
        return
    report = begin(device, arguments)
    check(parts, report, arguments.out, end)


def choose(set_name: str, names: list[str] | None) -> list[Part]:
    """The parts to run: those of a set, or the named ones and the limits they are compared with."""
    if names is None:
        return SETS[set_name]
    wanted = set(names) | ({LIMITS.name} if COMPARED & set(names) else set())
    return [part for part in PARTS if part.name in wanted]


def device_name() -> str | None:
    """Determined in another process, so that this one allocates nothing on the device."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    return done.stdout.strip() or None


def begin(device: str | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """A report with earlier results, from the output file and from added ones."""
    report: dict[str, Any] = {
        "what": "gpu_check",
        "is_dry": arguments.dry_run,
        "date": str(date.today()),
        "device": device,
        "seconds": {},
    }
    out, own = arguments.out or default_file(report), environment("torch", "transformers", "triton", "pyzmq")
    for file in [*([out] if out.exists() else []), *arguments.add]:
        add(report, json.loads(file.read_text()), names=own)
    # Reports may be merged on another machine than the one they are about.
    return own | report if arguments.parts == [] else report | own


def add(report: dict[str, Any], earlier: dict[str, Any], *, names: Iterable[str]) -> None:
    """Take over the parts of an earlier report, and ``names`` of what it is about, unless it is from another kind of
    device.
    """
    devices = {report["device"], earlier.get("device")} - {None}
    if earlier.get("is_dry") != report["is_dry"] or len(devices) > 1:
        print(f"not added: a report of {earlier.get('device')}, which is not {report['device']}", flush=True)
        return
    report["device"] = report["device"] or earlier.get("device")
    for name in names:
        if name in earlier:
            report.setdefault(name, earlier[name])
    for part in PARTS:
        if part.name in earlier:
            keep(report, part.name, earlier[part.name], earlier.get("seconds", {}).get(part.name, 0.0))


def keep(report: dict[str, Any], name: str, found: dict[str, Any], seconds: float) -> None:
    """Put the results of a part into the report. A lack of time does not replace earlier results."""
    if found.get("error") == NO_TIME and name in report:
        return
    report[name] = found
    report["seconds"][name] = seconds


def check(parts: list[Part], report: dict[str, Any], out: Path | None, end: float) -> None:
    """Run the parts until ``end``, and write and print the report however they end. SIGTERM, as from a caller's time
    limit, and Ctrl-C end the part in progress, which keeps what it has found, and the call with it.
    """
    folder = Path(tempfile.mkdtemp(prefix="triptych-gpu-", dir=roomiest()))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for index, part in enumerate(parts):
            start, later_s = time.monotonic(), sum(later.budget_s for later in parts[index + 1 :])
            found = attempt(part, folder, end - start, later_s, is_dry=report["is_dry"])
            found |= {"date": str(date.today()), "commit": report.get("commit")}
            seconds = round(time.monotonic() - start, 1)
            keep(report, part.name, found, seconds)
            finish(report, out)
            print(f"{part.name}: {seconds} s, {found.get('error', 'done')}", flush=True)
            if found.get("error") == STOPPED:
                break
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)
    finish(report, out)
    print("\n".join([table(report), *errors(report)]))


def finish(report: dict[str, Any], out: Path | None) -> None:
    """Conclusions from all parts together, and the file."""
    report["ratios"] = ratios(report)
    report["dropped"] = [part.name for part in PARTS if lookup(report, f"{part.name}.error") == NO_TIME]
    write(report, out)


def attempt(part: Part, folder: Path, left_s: float, later_s: float, *, is_dry: bool) -> dict[str, Any]:
    """The results of the part, with ``error`` if it did not complete. It may also use the time left that exceeds
    ``later_s``, the budgets of the parts after it: on a new machine, kernels are compiled first.
    """
    factor = 4 if is_dry else 1
    budget_s = max(factor * part.budget_s, left_s - factor * later_s)
    if left_s < min(budget_s, part.budget_s) / 2:  # it would be ended before it found anything
        return {"error": NO_TIME}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "TRIPTYCH_BENCH_DIR": str(folder), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    env.pop("TRITON_INTERPRET", None)
    if is_dry:
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, str(Path(__file__)), "--run-part", part.name, str(folder)]
    log = folder / f"{part.name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command + ["--dry-run"] * is_dry, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        error = wait(process, min(budget_s, left_s))
    file = folder / f"{part.name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    received = log.read_text(errors="replace")
    if error:
        found["error"] = error if error == STOPPED else explained(error, received)
        found["log"] = received[-6000:]
    elif received.strip():  # warnings, for example why there are no graphs
        found["said"] = received[-2000:]
    return found


def explained(error: str, received: str) -> str:
    """The error with the last output of the part; if a package is missing, only the error, because the rows name it."""
    why = last_line(received)
    return why if why.startswith("needs ") else f"{error}: {why}" if why else error


def last_line(text: str) -> str:
    """The line of a traceback that says what happened."""
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")


def wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """Why the part did not complete; empty if it did. All its processes end with it."""
    try:
        code = process.wait(limit_s)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:.0f} s"
    except KeyboardInterrupt:
        return STOPPED
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


def roomiest() -> str:
    """A folder for checkpoints: in memory if there is enough, because weights are read from there several times."""
    memory = "/dev/shm"
    if os.path.isdir(memory) and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 40 << 30:
        return memory
    return tempfile.gettempdir()


def ratios(report: dict[str, Any]) -> dict[str, float]:
    """Our throughput relative to transformers' continuous batching, on the same requests."""
    found = {}
    for name in ("small", "large"):
        ours = lookup(report, f"{name}.peer_workload.output_tokens_per_s")
        theirs = lookup(report, f"peers_{name}.sdpa continuous_batching")
        if isinstance(ours, float) and isinstance(theirs, float):
            found[name] = round(ours / theirs, 2)
    return found


def errors(report: dict[str, Any]) -> list[str]:
    """A line for each part that did not complete."""
    found = {part.name: lookup(report, f"{part.name}.error") for part in PARTS}
    return [f"{name}: {error}" for name, error in found.items() if error]


def write(report: dict[str, Any], out: Path | None) -> None:
    file = out or default_file(report)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(file)


def default_file(report: dict[str, Any]) -> Path:
    device = report["device"] or "unknown-gpu"
    name = "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())
    return Path(__file__).with_name(f"gpu_check_{name}_{report['date'].replace('-', '')[:6]}.json")


if __name__ == "__main__":
    main()
