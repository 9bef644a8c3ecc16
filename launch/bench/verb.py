"""``triptych bench``, from its options to its results."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import platform
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...driver.async_client import AsyncClient
from ...protocol.config import PipelineConfig
from ...protocol.errors import ConfigError
from ..pipeline import Pipeline, open_pipeline
from ..signals import INTERRUPTED
from ..terminal.output import OutputError
from ..terminal.progress import answers_bar
from ..terminal.report import say
from . import plot
from .drive import Run, Target, drive
from .http import HttpTarget
from .options import BenchOptions, LoadOptions
from .pipeline_target import PipelineTarget
from .report import show
from .summary import Targets, summarize
from .workload import make_queries

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass(frozen=True, slots=True)
class _Setting:
    """What the load is sent to."""

    target: Target
    name: str
    vocab_size: int | None  # None: unknown, so prompts are words


def bench(
    options: BenchOptions, config: PipelineConfig, *, run_dir: Path | None, connect: Path | None, console: Console
) -> int:
    """Measure and report; the exit code is 1 if no request was answered. Ctrl-C reports what has ended by then.

    Raises:
        ConfigError: the target does not respond, or an option is invalid.
        OutputError: the results cannot be written; checked before the load.
    """
    if options.target.url is not None and connect is not None:
        raise ConfigError("give --url or --connect, not both", param="url")
    _check_outputs(options)
    run, is_whole = Run(), True
    try:
        if options.target.url is not None:
            asyncio.run(_measure(_http(options), options, run, console))
        else:
            with open_pipeline(config, run_dir=run_dir, connect=connect, console=console) as pipeline:
                asyncio.run(_measure(_pipeline(pipeline, options), options, run, console))
    except KeyboardInterrupt:
        run.keep_ended()
        if not run.records:
            raise
        is_whole = False
        say(console, "interrupted: these are the requests that had ended", "yellow")
    summary = _report(options, run, Targets(options.report.ttft_target_ms, config.scheduler.itl_target_ms))
    return INTERRUPTED if not is_whole else 0 if summary["num_answered"] else 1


def _report(options: BenchOptions, run: Run, targets: Targets) -> dict[str, Any]:
    summary = summarize(run.records, run.duration_s, targets)
    _write(options, {"target": run.target, "options": _shown(options), **_facts(), "summary": summary}, run)
    if options.report.plot is not None:
        plot.draw(Path(options.report.plot), run.records, title=_title(run.target, options.load), targets=targets)
    _show(summary, options)
    return summary


async def _measure(opening: Any, options: BenchOptions, run: Run, console: Console) -> None:
    load = options.load
    async with opening as setting:
        queries = make_queries(
            options.prompts,
            count=load.num_prompts + load.num_warmups,
            seed=load.load_seed,
            vocab_size=setting.vocab_size,
        )
        if load.num_warmups:
            all_at_once = dataclasses.replace(load, request_rate=None)
            await drive(setting.target, queries[: load.num_warmups], all_at_once, Run())
        run.target = setting.name
        with _bar(console, run, load.num_prompts) if console.is_terminal else nullcontext():
            await drive(setting.target, queries[load.num_warmups :], load, run)


@asynccontextmanager
async def _pipeline(pipeline: Pipeline, options: BenchOptions) -> AsyncIterator[_Setting]:
    card = pipeline.client.info()["model"]
    sampling = {"temperature": options.prompts.temperature, "ignore_eos": options.prompts.ignore_eos}
    target = PipelineTarget(AsyncClient(client=pipeline.client), options=sampling)
    yield _Setting(target, card["model"], card["vocab_size"])


@asynccontextmanager
async def _http(options: BenchOptions) -> AsyncIterator[_Setting]:
    body: dict[str, Any] = {"temperature": options.prompts.temperature}
    if options.prompts.ignore_eos:
        body["ignore_eos"] = True
    target = HttpTarget(options.target, body=body)
    name = options.target.served_model or await target.first_model()
    target.set_model(name)
    yield _Setting(target, f"{name} at {options.target.url}", None)


def _check_outputs(options: BenchOptions) -> None:
    if options.report.plot is not None:
        plot.check(Path(options.report.plot))
    for path in filter(None, (options.report.output, options.report.plot)):
        try:
            with open(path, "ab"):
                pass
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}", param="output") from error


def _write(options: BenchOptions, result: dict[str, Any], run: Run) -> None:
    if (path := options.report.output) is None:
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**result, "requests": [record.to_json() for record in run.records]}, file)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {os.strerror(error.errno or 0)}", param="output") from error


def _shown(options: BenchOptions) -> dict[str, Any]:
    """Everything the results depend on, without secrets."""
    shown = dataclasses.asdict(options)
    del shown["target"]["api_key"]
    return shown


def _facts() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "triptych": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }


def _title(name: str, load: LoadOptions) -> str:
    rate = "all at once" if load.request_rate is None else f"{load.request_rate:g}/s {load.arrival}"
    turns = f", at most {load.max_concurrency} at once" if load.max_concurrency else ""
    return f"{name}: {load.num_prompts} requests, {rate}{turns}"


def _show(summary: dict[str, Any], options: BenchOptions) -> None:
    from rich.console import Console

    load = options.load
    show(summary, Console(), is_open=load.request_rate is not None and load.max_concurrency is None)


def _bar(console: Console, run: Run, total: int) -> AbstractContextManager[None]:
    from rich.progress import TextColumn, TimeElapsedColumn

    columns = (TimeElapsedColumn(), TextColumn("{task.fields[under_way]} under way"))
    return answers_bar(
        console, total, lambda: {"completed": run.num_ended, "under_way": run.num_sent - run.num_ended}, *columns
    )
