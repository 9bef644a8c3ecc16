"""Extracts the programs, commands and tables of docs/ so that tests can run them unchanged."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import typer

from triptych import Driver
from triptych.launch.cli import app

DOCS = Path(__file__).parents[2] / "docs"
_PART = re.compile(r"^#+ (?P<heading>[^\n]*)$|^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
TRIPTYCH = f'#!/bin/sh\nexec {sys.executable} -c "from triptych.launch.cli import main; main()" "$@"\n'


class Block(NamedTuple):
    """A fenced block, and the heading above it."""

    heading: str
    language: str
    text: str


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[Block]:
    """The blocks of one language, in order."""
    found, heading = [], ""
    for part in _PART.finditer(read(name)):
        if part["heading"] is not None:
            heading = part["heading"]
        elif part["language"] == language:
            found.append(Block(heading, language, part["text"]))
    return found


def table(name: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, header row first."""
    section = re.split(r"\n## ", read(name).split(f"\n## {heading}\n", 1)[1], maxsplit=1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows if not row.startswith("|---")]


def parse_triptych(call: str) -> None:
    """Raises:
    click.UsageError: the command line would refuse this call.
    """
    program, verb, *arguments = shlex.split(call, comments=True)
    assert program == "triptych", call
    parent = _command().make_context("triptych", [verb])
    _command().commands[verb].make_context(verb, arguments, parent=parent)


@cache
def _command() -> Any:
    """The command line, whose readers of values are made when they are first used."""
    return typer.main.get_command(app)


def shell_environment(folder: Path, **variables: str) -> dict[str, str]:
    """An environment whose ``triptych`` and ``python`` are those of this checkout, put into ``folder``."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "triptych").write_text(TRIPTYCH)
    (programs / "triptych").chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(DOCS.parent), "no_proxy": "*", **variables}


def borrowed(code: str, folder: Path, driver: Driver) -> list[str]:
    """The command that runs a program of a page with that driver's pipeline."""
    program = folder / "program.py"
    program.write_text(code, encoding="utf-8")
    return [sys.executable, str(Path(__file__).with_name("borrow.py")), str(driver.run_dir), str(program)]


def run_borrowed(code: str, folder: Path, driver: Driver) -> str:
    """The program's output."""
    command = borrowed(code, folder, driver)
    environment = shell_environment(folder)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def assert_no_text_is_blank(output: str) -> None:
    """An empty answer, on its own line or in a list, would look broken to a reader who tries the example."""
    lines = output.splitlines() or [""]
    assert [line for line in lines if not line.strip() or re.search(r"""(''|"")(?=[],)])""", line)] == []


@contextmanager
def background(script: str, folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A program of one block in the background; killed at the end if it still runs."""
    with subprocess.Popen(
        ["sh", "-c", f"exec {script.strip()}"], cwd=folder, env=environment, text=True, stderr=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()
