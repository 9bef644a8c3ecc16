"""``triptych generate``: answers to prompts from arguments, a file or a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..driver.stream import Completion
from ..protocol.config import PipelineConfig
from ..protocol.errors import ConfigError, RequestError
from ..protocol.sampling import SamplingParams
from .batch import answers
from .flags import OutputFormat
from .output import Sink, Writer, make_writer, open_sink
from .pipeline import Pipeline, open_pipeline
from .prompts import Job, as_chat, jobs_from_lines, jobs_from_texts
from .report import number, say, summary_line

if TYPE_CHECKING:
    from rich.console import Console

STDIN = Path("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to answer, how, and where to write it."""

    prompts: list[str]
    file: Path | None  # "-": standard input
    output: Path | None
    output_format: OutputFormat
    chat: bool | None  # None: if the model has a chat template
    stream: bool | None  # None: one prompt, text, to a terminal
    params: SamplingParams


def generate(
    task: Task, config: PipelineConfig, *, run_dir: Path | None, connect: Path | None, console: Console
) -> int:
    """The exit code: 0 if every prompt was answered, 1 if one was not.

    Raises:
        ConfigError: there is nothing to answer, or the task contradicts itself.
        OutputError: the answers cannot be written.
    """
    jobs = _read(task)
    with open_sink(task.output) as sink:
        streams = _streams(task, jobs, sink)
        with open_pipeline(config, run_dir=run_dir, connect=connect, console=console) as pipeline:
            chat = pipeline.has_chat_template if task.chat is None else task.chat
            if streams:
                return _stream(pipeline, jobs[0], _request(jobs[0], task.params, chat=chat), sink, console)
            writer = make_writer(sink, task.output_format)
            requests = [(job, _request(job, task.params, chat=chat)) for job in jobs]
            shows_bar = console.is_terminal and not sink.is_terminal
            with _bar(console, len(jobs)) if shows_bar else _no_bar() as look:
                return _write_all(pipeline, requests, writer, look, console)


def _read(task: Task) -> list[Job]:
    if task.prompts and task.file is not None:
        raise ConfigError("give prompts or a file, not both", param="file")
    if task.prompts:
        return jobs_from_texts(task.prompts)
    if task.file is None and sys.stdin.isatty():
        raise ConfigError("nothing to answer: give a prompt, --file, or lines on standard input", param="prompts")
    try:
        if task.file is None or task.file == STDIN:
            jobs = jobs_from_lines(sys.stdin.buffer)
        else:
            with task.file.open("rb") as lines:
                jobs = jobs_from_lines(lines)
    except OSError as error:
        raise ConfigError(f"cannot read {task.file}: {error.strerror}", param="file") from error
    if not jobs:
        raise ConfigError("nothing to answer: there is no line that is not blank", param="file")
    return jobs


def _streams(task: Task, jobs: list[Job], sink: Sink) -> bool:
    is_text = task.output_format is OutputFormat.text
    if task.stream is None:
        return len(jobs) == 1 and is_text and sink.is_terminal
    if task.stream and (len(jobs) > 1 or not is_text):
        raise ConfigError("only one prompt can be streamed, and only as text", param="stream")
    return task.stream


def _request(job: Job, params: SamplingParams, *, chat: bool) -> dict[str, Any]:
    """What is sent: a line's own parameters win over the flags."""
    request = {**params.to_wire(), **job.request}
    return as_chat(request) if chat else request


def _stream(pipeline: Pipeline, job: Job, request: dict[str, Any], sink: Sink, console: Console) -> int:
    """Write one answer as it comes; of several choices, one after the other."""
    if job.error is not None:
        raise job.error
    stream = pipeline.client.submit(**request)
    for choice in stream.choices:
        for delta in choice:
            sink.write(delta.text)
        sink.write("\n")
    if console.is_terminal:
        say(console, summary_line(stream.result()))
    return 0


def _write_all(
    pipeline: Pipeline,
    requests: list[tuple[Job, dict[str, Any]]],
    writer: Writer,
    look: Callable[[int], None],
    console: Console,
) -> int:
    started = time.monotonic()
    num_failed = num_tokens = 0
    try:
        for job, result in answers(pipeline, requests, look=look):
            if isinstance(result, Completion):
                writer.answer(job, result)
                num_tokens += result.usage["completion_tokens"]
            else:
                num_failed += 1
                writer.failure(job, result)
                _complain(job, result, console)
    except KeyboardInterrupt:
        say(console, "interrupted: requests in flight are aborted", "yellow")
        raise
    elapsed_s = time.monotonic() - started
    if len(requests) > 1 or num_failed:
        say(
            console,
            f"{len(requests) - num_failed} of {len(requests)} prompts answered, {num_failed} failed ·"
            f" {num_tokens} tokens in {elapsed_s:.1f} s · {number(num_tokens / elapsed_s)} tok/s",
            "red" if num_failed else "dim",
        )
    return 1 if num_failed else 0


def _complain(job: Job, error: RequestError, console: Console) -> None:
    say(console, f"prompt {job.index}: {error.message} ({error.code})", "red")


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def _no_bar() -> Iterator[Callable[[int], None]]:
    yield lambda _: None
