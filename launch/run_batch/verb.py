"""Answers the requests of a file through the gateway's own routes, and writes a line for each as it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from ...driver.requests import MAX_IN_FLIGHT
from ...protocol.config import PipelineConfig
from ...protocol.errors import ConfigError
from ..batch import OVERLOADED_S, RETRY_S
from ..gateway.app import create_app
from ..gateway.config import GatewayConfig
from ..gateway.serving.server import make_gateway
from ..gateway.state import Gateway
from ..pipeline import Pipeline, open_pipeline
from ..terminal.output import Sink, check_output, open_sink
from ..terminal.progress import count_bar
from ..terminal.report import batch_line, say
from .in_process import post
from .lines import Line, Reply, left_to_answer, read_lines, row_of

if TYPE_CHECKING:
    from rich.console import Console

_OVERLOADED = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to answer, and where to write it."""

    file: Path
    output: Path
    resume: bool  # continue what an earlier call left in ``output``
    gateway: GatewayConfig


def run_batch(
    task: Task, config: PipelineConfig, *, run_dir: Path | None, connect: Path | None, console: Console
) -> int:
    """Returns the exit code: 0 if every request was answered, otherwise 1.

    Raises:
        ConfigError: a line is not a batch request; nothing was started then.
        OutputError: the answers cannot be written.
    """
    check_output(task.output, task.file)
    lines = _read(task.file)
    left = lines
    if task.resume:
        left = left_to_answer(lines, task.output)
        say(console, f"{len(lines) - len(left)} of {len(lines)} requests are already answered")
    if not left:
        return 0
    with (
        open_sink(task.output, append=task.resume) as sink,
        open_pipeline(config, run_dir=run_dir, connect=connect, console=console) as pipeline,
        count_bar(console, "answers", len(left)) as show,
    ):
        run = _Run(pipeline, make_gateway(task.gateway, pipeline.run_dir), sink, show)
        try:
            asyncio.run(run.answer(left))
        except KeyboardInterrupt:
            say(console, "interrupted: requests in flight are aborted; the same call with --resume continues", "yellow")
            raise
    say(console, run.account(), "red" if run.num_failed else "dim")
    return 1 if run.num_failed else 0


def _read(path: Path) -> list[Line]:
    try:
        with path.open("rb") as lines:
            return read_lines(lines)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="file") from error


class _Run:
    """Sends requests to one pipeline, as many at once as a client may have."""

    def __init__(self, pipeline: Pipeline, gateway: Gateway, sink: Sink, show: Callable[[int], None]) -> None:
        self._pipeline, self._gateway, self._sink, self._show = pipeline, gateway, sink, show
        self._began = self._last_end = time.monotonic()
        self.num_ended = self.num_failed = self._num_tokens = 0

    async def answer(self, lines: list[Line]) -> None:
        """
        Raises:
            TriptychError: the pipeline ended, so no further answers will come.
        """
        app, waiting = create_app(self._gateway), iter(lines)
        tasks = [asyncio.create_task(self._carry(app, waiting)) for _ in range(min(MAX_IN_FLIGHT, len(lines)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._gateway.client.close()
            self._gateway.board.close()

    async def _carry(self, app: ASGIApp, waiting: Iterator[Line]) -> None:
        for line in waiting:
            reply = await self._ask(app, line)
            self._sink.write(row_of(line, reply))
            self._last_end = time.monotonic()
            self.num_ended += 1
            self.num_failed += not reply.is_answer
            self._num_tokens += reply.num_tokens
            self._show(self.num_ended)

    async def _ask(self, app: ASGIApp, line: Line) -> Reply:
        """The final reply: a request refused because others fill the queue is retried."""
        began = time.monotonic()
        while (reply := await post(app, line)).status == _OVERLOADED:
            if time.monotonic() - max(began, self._last_end) > OVERLOADED_S:
                break
            await asyncio.sleep(RETRY_S)
        if reply.status >= 500:
            self._pipeline.check()
        return reply

    def account(self) -> str:
        return batch_line(
            "requests",
            num_ended=self.num_ended,
            num_failed=self.num_failed,
            num_tokens=self._num_tokens,
            elapsed_s=time.monotonic() - self._began,
        )
