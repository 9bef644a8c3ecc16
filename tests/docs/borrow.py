"""Runs a program of a page with an already running pipeline: ``borrow.py RUN_DIR PROGRAM``.

Its drivers are clients of that pipeline, so the page keeps its model names without the cost of a start.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import triptych

RUN_DIR, PROGRAM = sys.argv[1:]


class Driver(triptych.Client):
    """The part of a driver used by programs that neither stop nor configure it."""

    def __init__(self, model: str, *, run_dir: str = "", **options: Any) -> None:
        triptych.PipelineConfig.from_options(model=model, **options)  # raises where a driver would
        super().__init__(RUN_DIR)
        self.run_dir = RUN_DIR


class AsyncDriver(triptych.AsyncClient):
    """The same in an event loop."""

    def __init__(self, model: str) -> None:
        super().__init__(RUN_DIR)


if __name__ == "__main__":
    triptych.Driver, triptych.AsyncDriver = Driver, AsyncDriver  # type: ignore[misc, assignment]
    runpy.run_path(PROGRAM, run_name="__main__")
