"""Finds this user's running pipelines on this machine, wherever their run directories are."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..protocol.errors import ConfigError

WORKER = "triptych.workers.prepare"  # one of each pipeline's processes


def running_pipelines() -> list[Path]:
    """Their run directories, taken from the command lines of the workers."""
    found = set()  # while a worker is replaced, there may be two
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # it ended meanwhile, or is not a worker
            if process.stat().st_uid == os.getuid():
                arguments = os.fsdecode((process / "cmdline").read_bytes()).split("\0")
                if WORKER in arguments:
                    found.add(Path(arguments[arguments.index("--run-dir") + 1]))
    return sorted(found)


def the_running_pipeline() -> Path:
    """The run directory of the only running pipeline.

    Raises:
        ConfigError: there is none, or several.
    """
    found = running_pipelines()
    if not found:
        raise ConfigError("none of your pipelines is running here; triptych serve starts one", param="run_dir")
    if len(found) > 1:
        names = "\n  ".join(map(str, found))
        raise ConfigError(f"several pipelines are running, name one:\n  {names}", param="run_dir")
    return found[0]
