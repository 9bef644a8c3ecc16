"""``triptych embed``: turns texts from arguments, a file or a pipe into vectors."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol.config import PipelineConfig
from ..batch import Batch
from ..pipeline import open_pipeline
from ..terminal.output import JsonlWriter, check_output, open_sink
from ..terminal.progress import batch_bar
from .generate import read_jobs, write_all

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to embed, how, and where to write it."""

    prompts: list[str]
    file: Path | None  # "-": standard input
    output: Path | None
    prompt_name: str | None  # None: the checkpoint's default
    dimensions: int | None  # None: all
    lora: str  # the adapter that computes it; empty: the base model


def embed(task: Task, config: PipelineConfig, *, run_dir: Path | None, connect: Path | None, console: Console) -> int:
    """Returns the exit code: 0 if every text was embedded, otherwise 1.

    Raises:
        ConfigError: there is nothing to embed, or the options contradict each other.
        OutputError: the vectors cannot be written.
    """
    check_output(task.output, task.file)
    jobs = read_jobs(task.prompts, task.file)
    common: dict[str, Any] = {
        "embedding": True, "prompt_name": task.prompt_name, "dimensions": task.dimensions, "lora": task.lora
    }  # fmt: skip
    with (
        open_sink(task.output) as sink,
        open_pipeline(config, run_dir=run_dir, connect=connect, console=console) as pipeline,
    ):
        batch = Batch(pipeline, [(job, {**common, **job.request}) for job in jobs])
        shows_bar = console.is_terminal and not sink.is_terminal
        with batch_bar(console, batch) if shows_bar else nullcontext():
            return write_all(batch, JsonlWriter(sink), console, can_resume=False)
