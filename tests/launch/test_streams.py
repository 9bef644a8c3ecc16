"""Verbs whose standard input or output was closed, as some supervisors do."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.launch.test_processes import COMMAND, HASH


@pytest.mark.parametrize(
    ("closed", "arguments", "words"),
    [
        ("<&-", ["generate"], "nothing to answer"),
        (">&-", ["generate", "hi"], "cannot write standard output"),
        (">&-", ["generate", "hi", "--stream"], "cannot write standard output"),
    ],
)
def test_a_stream_that_is_closed_is_told_of(closed: str, arguments: list[str], words: str) -> None:
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *COMMAND, *arguments, *HASH, "--max-tokens", "2"]
    outcome = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=False)
    assert words in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert outcome.returncode in (1, 2)


@pytest.mark.parametrize("arguments", [["info", "--connect"], ["top", "--once"]], ids=lambda arguments: arguments[0])
def test_an_output_without_these_characters_gets_others(arguments: list[str], run_dir: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    command = [*COMMAND, *arguments, run_dir]
    outcome = subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    assert (outcome.returncode, outcome.stderr) == (0, b"")
    assert b"hash-lm" in outcome.stdout
