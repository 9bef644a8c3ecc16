"""Writes answers: text or JSONL rows, to a file or to standard output, with errors that name the target."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from ...driver.stream import Completion
from ...protocol.errors import ConfigError, RequestError, TriptychError
from ...protocol.sampling import SamplingParams
from ..flags.derived import OutputFormat
from ..prompts import Job
from .json_lines import json_line
from .report import printable


class OutputError(TriptychError):
    """The target for the answers cannot be written."""

    code = "output"


class Sink:
    """Unbuffered bytes to a file or to standard output: errors are raised by the write that causes them."""

    def __init__(self, file: FileIO, name: str) -> None:
        self._file, self._name = file, name

    def write(self, text: str) -> None:
        text = printable(text) if self.is_terminal else text
        with _naming(self._name):
            rest = memoryview(text.encode(errors="backslashreplace"))  # escapes lone surrogates
            while rest:
                rest = rest[self._file.write(rest) :]

    @property
    def is_terminal(self) -> bool:
        return self._file.isatty()


def check_output(path: Path | None, source: Path | None) -> None:
    """
    Raises:
        ConfigError: the answers would overwrite their own requests.
    """
    with suppress(OSError):  # one of them does not exist
        if path is not None and source is not None and path.samefile(source):
            raise ConfigError(f"output is {path}, which is the file with the requests", param="output")


def check_shown(params: SamplingParams, *names: str, how: str) -> None:
    """
    Raises:
        ConfigError: one of these parameters asks for something that is not shown.
    """
    default = SamplingParams()
    for name in names:
        if (value := getattr(params, name)) != getattr(default, name):
            raise ConfigError(f"{name} is {value}, but {how}", param=name)


@contextmanager
def open_sink(path: Path | None, *, append: bool = False) -> Iterator[Sink]:
    """The file at ``path``, truncated unless ``append``, or standard output.

    Raises:
        OutputError: it cannot be opened or written.
    """
    name = "standard output" if path is None else str(path)
    with _naming(name):
        file = FileIO(sys.stdout.fileno(), "w", closefd=False) if path is None else FileIO(path, "a" if append else "w")
    with file:
        yield Sink(file, name)


class Writer(Protocol):
    """Takes the answers, in the order of the prompts."""

    def answer(self, job: Job, completion: Completion) -> None: ...

    def failure(self, job: Job, error: RequestError) -> None: ...


class TextWriter:
    """One answer after the other, each choice followed by a newline; a failure is an empty line."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def answer(self, job: Job, completion: Completion) -> None:
        for choice in completion.choices:
            self._sink.write(choice.text + "\n")

    def failure(self, job: Job, error: RequestError) -> None:
        self._sink.write("\n")


class JsonlWriter:
    """One JSON object per choice and line, with everything known about the answer."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def answer(self, job: Job, completion: Completion) -> None:
        for choice in completion.choices:
            place = {"choice": choice.index} if len(completion.choices) > 1 else {}
            self._answer(job, choice, {"request_id": completion.request_id, **place})

    def _answer(self, job: Job, completion: Completion, names: dict[str, Any]) -> None:
        if (embedding := completion.embedding) is not None:
            answer: dict[str, Any] = {"embedding": embedding.astype(float).tolist()}
        else:
            answer = {name: getattr(completion, name) for name in ("text", "token_ids", "finish_reason")}
        row = {**names, **job.shown, **answer, "usage": completion.usage, "ledger": completion.ledger}
        if completion.score is not None:
            row["score"] = completion.score
        if completion.logprobs is not None:
            row["logprobs"] = completion.logprobs
        if (prompt := completion.prompt_token_ids) is not None:
            row.setdefault("prompt_token_ids", prompt)  # --resume compares those of the line, before truncation
        if (of_prompt := completion.prompt_logprobs) is not None:
            row["prompt_logprobs"] = [None if token is None else asdict(token) for token in of_prompt]
        self._write(job, row)

    def failure(self, job: Job, error: RequestError) -> None:
        facts = {"code": error.code, "message": error.message, "param": error.param}
        partial: Completion | None = error.partial
        known = {} if partial is None else {"request_id": partial.request_id}
        produced = {"text": partial.text, "token_ids": partial.token_ids} if partial and partial.token_ids else {}
        self._write(job, {**known, **job.shown, **produced, "error": facts})

    def _write(self, job: Job, row: dict[str, Any]) -> None:
        names = {"index": job.index} if job.id is None else {"index": job.index, "id": job.id}
        self._sink.write(json_line({**names, **row}))


def choose_format(output_format: OutputFormat | None, path: Path | None) -> OutputFormat:
    """The requested format; by default the one indicated by the path's suffix."""
    if output_format is not None:
        return output_format
    return OutputFormat.jsonl if path is not None and path.suffix in (".jsonl", ".ndjson") else OutputFormat.text


def make_writer(sink: Sink, output_format: OutputFormat) -> Writer:
    return JsonlWriter(sink) if output_format is OutputFormat.jsonl else TextWriter(sink)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # the reader closed the pipe: end quietly, like any filter
        raise SystemExit(128 + 13) from None
    except OSError as error:
        raise OutputError(f"cannot write {name}: {os.strerror(error.errno or 0)}", param="output") from error
