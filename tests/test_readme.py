"""The Python of README.md and of the how-to pages runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import parse_triptych

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOW_TO = (ROOT / "docs" / "structured.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README + HOW_TO, re.DOTALL)
SHELL = "\n".join(re.findall(r"```\n(.*?)```", README, re.DOTALL))
CALLS = re.findall(r"^(?:\.venv/bin/)?(triptych .*)$", SHELL, re.MULTILINE)


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_a_block_runs(block: int) -> None:
    """The first as it stands, the others on the hash LM, which needs no torch and takes all that a model takes."""
    code = BLOCKS[block] if block == 0 else BLOCKS[block].replace('"demo"', '"hash-lm"')
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("call", CALLS)
def test_a_command_is_one_that_is_taken(call: str) -> None:
    parse_triptych(call)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:tests|protocol|launch)/[\w/.]+\.\w+)`", README))))
def test_a_file_that_is_named_exists(path: str) -> None:
    assert (ROOT / path).is_file()
