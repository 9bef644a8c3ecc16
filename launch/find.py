"""Pipelines of this user that run on this machine, wherever their run directories are."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..protocol.errors import ConfigError

WORKER = "triptych.workers.prepare"  # one of each pipeline's processes


def running_pipelines() -> list[Path]:
    """Run directories; read from the command lines of the workers."""
    found = set()  # spares have the command lines of the workers that they will be
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # it ended meanwhile, or is no worker
            if process.stat().st_uid == os.getuid():
                arguments = (process / "cmdline").read_bytes().decode().split("\0")
                if WORKER in arguments:
                    found.add(Path(arguments[arguments.index("--run-dir") + 1]))
    return sorted(found)


def the_running_pipeline() -> Path:
    """The run directory of the only one.

    Raises:
        ConfigError: there is none, or several.
    """
    found = running_pipelines()
    if not found:
        raise ConfigError(
            "you have no running pipeline on this machine; start one with triptych serve", param="run_dir"
        )
    if len(found) > 1:
        raise ConfigError(
            "several pipelines are running, name one of:\n  " + "\n  ".join(map(str, found)), param="run_dir"
        )
    return found[0]
