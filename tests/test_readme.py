"""The Python of README.md, and of the package's own documentation, runs unchanged."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import triptych
from tests.docs.pages import assert_no_text_is_blank, run_borrowed
from triptych import Driver

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_first_block_runs() -> None:
    command = [sys.executable, "-c", BLOCKS[0]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # may compile the kernels
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Return the number of items in a container."


@pytest.mark.parametrize("block", range(1, len(BLOCKS)))
def test_block_answers_with_text(block: int, demo_driver: Driver, tmp_path: Path) -> None:
    assert_no_text_is_blank(run_borrowed(BLOCKS[block], tmp_path, demo_driver))


@pytest.mark.parametrize("documented", [triptych, triptych.Driver], ids=["package", "Driver"])
def test_example_in_a_docstring_answers_with_text(documented: Any, demo_driver: Driver, tmp_path: Path) -> None:
    examples = doctest.DocTestParser().get_examples(documented.__doc__)
    program = "from triptych import Driver\n" + "".join(example.source for example in examples)
    assert_no_text_is_blank(run_borrowed(program, tmp_path, demo_driver))


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:tests|protocol|launch)/[\w/.]+\.\w+)`", README))))
def test_named_files_exist(path: str) -> None:
    assert (ROOT / path).is_file()
