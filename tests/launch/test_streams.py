"""Verbs whose standard input or output is closed, as some supervisors do."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.launch.test_processes import COMMAND, HASH


@pytest.mark.parametrize(
    ("closed", "arguments", "words"),
    [
        ("<&-", ["generate", *HASH], "nothing to answer"),
        (">&-", ["generate", "hi", "--connect", "{run_dir}"], "cannot write standard output"),
        (">&-", ["generate", "hi", "--stream", "--connect", "{run_dir}"], "cannot write standard output"),
        (">&-", ["info", "--connect", "{run_dir}"], "cannot write the output"),
    ],
)
def test_closed_stream_is_reported(closed: str, arguments: list[str], words: str, run_dir: str) -> None:
    arguments = [argument.format(run_dir=run_dir) for argument in arguments]
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *COMMAND, *arguments]
    outcome = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=False)
    assert words in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert outcome.returncode in (1, 2)


@pytest.mark.parametrize("arguments", [["info", "--connect"], ["top", "--once"]], ids=lambda arguments: arguments[0])
def test_characters_that_the_output_cannot_encode_are_replaced(arguments: list[str], run_dir: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    command = [*COMMAND, *arguments, run_dir]
    outcome = subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    assert (outcome.returncode, outcome.stderr) == (0, b"")
    assert b"hash-lm" in outcome.stdout


def run_with_full_output(*arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code and stderr; without ``PYTHONUNBUFFERED`` a short output is written at the very end."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments],
            env={**inherited, **environment},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    return done.returncode, done.stderr


REPLAY = ["replay", "--requests", "3", "--step-ms", "8", "--json"]


@pytest.mark.parametrize(
    ("arguments", "is_unbuffered"),
    [
        (["--version"], ""),
        (["--help"], ""),
        (["--help"], "1"),
        (["info", "--connect", "{run_dir}"], ""),
        (["top", "--once", "{run_dir}"], "1"),
        (REPLAY, "1"),
    ],
)
def test_full_output_is_an_error_in_one_line(arguments: list[str], is_unbuffered: str, run_dir: str) -> None:
    arguments = [argument.format(run_dir=run_dir) for argument in arguments]
    outcome = run_with_full_output(*arguments, PYTHONUNBUFFERED=is_unbuffered)
    assert outcome == (1, "error: cannot write the output: No space left on device\n")


def test_full_standard_output_is_named_for_answers(run_dir: str) -> None:
    outcome = run_with_full_output("generate", "hi", "--connect", run_dir)
    assert outcome == (1, "error: cannot write standard output: No space left on device\n")


def test_closed_output_pipe_is_not_an_error(run_dir: str) -> None:
    shell = 'set -o pipefail; "$@" | true'
    command = ["bash", "-c", shell, "bash", *COMMAND, "info", "--json", "--connect", run_dir]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert outcome.returncode in (0, 1, 141)  # 0: it was written before the reader closed the pipe
    assert outcome.stderr == ""
