"""Verbs whose standard input or output was closed, as some supervisors do."""

from __future__ import annotations

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
