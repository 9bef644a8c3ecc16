"""``--resume``: what an earlier call left in the output file, and what remains to be answered."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..protocol.errors import ConfigError
from .prompts import Job

Key = tuple[str, Any]  # ("id", of the line) if it has one, otherwise ("index", of the prompt)


class _Row(NamedTuple):
    line: bytes
    row: dict[str, Any]


def left_to_answer(jobs: list[Job], path: Path, *, num_choices: int = 1) -> list[Job]:
    """The jobs without an answer in the file at ``path``, from which everything but answers is removed.

    Failures are dropped and retried, and so are lines, or the choices of a prompt, left incomplete by a full disk or a
    kill. ``num_choices`` applies to prompts that do not specify how many they want.

    Raises:
        ConfigError: the file cannot be read or written, two jobs have the same id, or an answer is to another prompt.
    """
    content = read_output(path)
    found = {(_key_of_row(row.row), row.row.get("choice", 0)): row for row in _answers(content)}
    rows: dict[Key, list[_Row]] = {}
    for (key, _), row in found.items():
        rows.setdefault(key, []).append(row)
    left = []
    for key, job in _by_key(jobs).items():
        if any(row.row.get(name) != value for row in rows.get(key, ()) for name, value in job.shown.items()):
            raise ConfigError(f"{path}: the answer with {key[0]} {key[1]!r} is to another prompt", param="resume")
        if len(rows.get(key, ())) < _num_choices(job, num_choices):
            rows.pop(key, None)
            left.append(job)
    kept = b"".join(row.line for (key, _), row in found.items() if key in rows)
    if kept != content:
        replace_output(path, kept)
    return left


def _num_choices(job: Job, default: int) -> int:
    wanted = job.request.get("n", default)
    return wanted if isinstance(wanted, int) else 1  # an invalid value is refused, and so never answered


def _answers(content: bytes) -> Iterator[_Row]:
    for line in content.splitlines(keepends=True):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if line.endswith(b"\n") and isinstance(row, dict) and "index" in row and "text" in row and "error" not in row:
            yield _Row(line, row)


def _by_key(jobs: list[Job]) -> dict[Key, Job]:
    found: dict[Key, Job] = {}
    for job in jobs:
        if _key(job) in found:
            raise ConfigError(f"two prompts have the id {job.id!r}: --resume cannot tell them apart", param="resume")
        found[_key(job)] = job
    return found


def _key(job: Job) -> Key:
    return ("index", job.index) if job.id is None else ("id", job.id)


def _key_of_row(row: dict[str, Any]) -> Key:
    return ("id", row["id"]) if "id" in row else ("index", row["index"])


def read_output(path: Path) -> bytes:
    """The output of an earlier call; empty if there is none.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="output") from error


def replace_output(path: Path, content: bytes) -> None:
    """Replace the output of an earlier call atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = path.resolve()  # keeps a symbolic link
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ConfigError(f"cannot write {temporary}: {error.strerror}", param="output") from error
