"""``triptych generate``: answers prompts from arguments, a file or a pipe."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...driver.stream import Completion
from ...protocol.config import PipelineConfig
from ...protocol.errors import ConfigError, PipelineClosed, RequestError
from ...protocol.sampling import SamplingParams
from ..batch import Batch, num_tokens_of
from ..flags.derived import OutputFormat
from ..pipeline import Pipeline, open_pipeline
from ..prompts import Job, as_chat, jobs_from_lines, jobs_from_texts
from ..resume import left_to_answer
from ..terminal.output import Sink, Writer, check_output, check_shown, make_writer, open_sink
from ..terminal.progress import batch_bar
from ..terminal.report import batch_line, say, summary_line

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
    lora: str  # the adapter that answers; empty: the base model
    resume: bool  # continue what an earlier call left in ``output``
    chat: bool | None  # None: if the model has a chat template
    stream: bool | None  # None: one prompt, text, to a terminal
    params: SamplingParams


def generate(
    task: Task, config: PipelineConfig, *, run_dir: Path | None, connect: Path | None, console: Console
) -> int:
    """Returns the exit code: 0 if every prompt was answered, otherwise 1.

    Raises:
        ConfigError: there is nothing to answer, or the options contradict each other.
        OutputError: the answers cannot be written.
    """
    check_output(task.output, task.file)
    if task.output_format is OutputFormat.text:
        check_shown(task.params, "logprobs", "prompt_logprobs", how="a text has none: they need --format jsonl")
    jobs = read_jobs(task.prompts, task.file)
    if task.resume:
        jobs = _resume(task, jobs, console)
    if not jobs:
        return 0
    with open_sink(task.output, append=task.resume) as sink:
        streams = _streams(task, jobs, sink)
        with open_pipeline(config, run_dir=run_dir, connect=connect, console=console) as pipeline:
            chat = pipeline.has_chat_template if task.chat is None else task.chat
            if streams:
                return _stream(pipeline, jobs[0], _request(jobs[0], task, chat=chat), sink, console)
            writer = make_writer(sink, task.output_format)
            requests = [(job, _request(job, task, chat=chat)) for job in jobs]
            batch = Batch(pipeline, requests)
            shows_bar = console.is_terminal and not sink.is_terminal
            is_file = task.output is not None and task.output_format is OutputFormat.jsonl
            with batch_bar(console, batch) if shows_bar else nullcontext():
                return write_all(batch, writer, console, can_resume=is_file)


def read_jobs(prompts: list[str], file: Path | None) -> list[Job]:
    """The prompts of the command line, or else those in the lines of ``file`` or of standard input.

    Raises:
        ConfigError: there are none, or they cannot be read.
    """
    if prompts and file is not None:
        raise ConfigError("give prompts or a file, not both", param="file")
    if prompts:
        return jobs_from_texts(prompts)
    if file is None and sys.stdin.isatty():
        raise ConfigError("nothing to answer: give a prompt, --file, or lines on standard input", param="prompts")
    try:
        if file is None or file == STDIN:
            jobs = jobs_from_lines(sys.stdin.buffer)
        else:
            with file.open("rb") as lines:
                jobs = jobs_from_lines(lines)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", param="file") from error
    if not jobs:
        raise ConfigError("nothing to answer: all lines are blank", param="file")
    return jobs


def _resume(task: Task, jobs: list[Job], console: Console) -> list[Job]:
    if task.output is None or task.output_format is not OutputFormat.jsonl:
        raise ConfigError("--resume needs --output with JSON lines: they show what is answered", param="resume")
    left = left_to_answer(jobs, task.output, num_choices=task.params.n)
    say(console, f"{len(jobs) - len(left)} of {len(jobs)} prompts are already answered")
    return left


def _streams(task: Task, jobs: list[Job], sink: Sink) -> bool:
    is_text = task.output_format is OutputFormat.text
    if task.stream is None:
        return len(jobs) == 1 and is_text and sink.is_terminal
    if task.stream and (len(jobs) > 1 or not is_text):
        raise ConfigError("only one prompt can be streamed, and only as text", param="stream")
    return task.stream


def _request(job: Job, task: Task, *, chat: bool) -> dict[str, Any]:
    """The request to send: a line's own parameters override the flags."""
    request = {**task.params.to_wire(), "lora": task.lora, **job.request}
    return as_chat(request) if chat else request


def _stream(pipeline: Pipeline, job: Job, request: dict[str, Any], sink: Sink, console: Console) -> int:
    """Write one answer as it arrives; several choices one after the other."""
    if job.error is not None:
        raise job.error
    stream = pipeline.client.submit(**request)
    try:
        for choice in stream.choices:
            for delta in choice:
                sink.write(delta.text)
            sink.write("\n")
        if console.is_terminal:
            say(console, summary_line(stream.result()))
    finally:
        with suppress(PipelineClosed):  # which ended every request
            stream.abort()  # no effect if it has ended
    return 0


def write_all(batch: Batch, writer: Writer, console: Console, *, can_resume: bool) -> int:
    """Returns the exit code. ``can_resume``: the same call with --resume would continue an interrupted one."""
    started = time.monotonic()
    num_failed = num_tokens = 0
    try:
        for job, result in batch.answers():
            if isinstance(result, Completion):
                writer.answer(job, result)
                num_tokens += num_tokens_of(result)
            else:
                num_failed += 1
                writer.failure(job, result)
                _complain(job, result, console)
    except KeyboardInterrupt:
        hint = "; the same call with --resume continues" if can_resume else ""
        say(console, f"interrupted: requests in flight are aborted{hint}", "yellow")
        raise
    elapsed_s = time.monotonic() - started
    if batch.num_jobs > 1 or num_failed:
        line = batch_line(
            "prompts", num_ended=batch.num_jobs, num_failed=num_failed, num_tokens=num_tokens, elapsed_s=elapsed_s
        )
        say(console, line, "red" if num_failed else "dim")
    return 1 if num_failed else 0


def _complain(job: Job, error: RequestError, console: Console) -> None:
    say(console, f"prompt {job.index}: {error.message} ({error.code})", "red")
