"""The Node program of docs/other-languages.md, run unchanged."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.compat.conftest import node_folder_with
from tests.launch.gateway.conftest import Site

PAGE = Path(__file__).parents[2] / "docs" / "other-languages.md"
[PROGRAM] = re.findall(r"```js\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
QUESTION = "What does len do?"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def node(site: Site, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    assert site.driver is not None
    (folder / "node_modules").symlink_to(node_folder_with("zeromq", "@msgpack/msgpack") / "node_modules")
    (folder / "client.mjs").write_text(PROGRAM, encoding="utf-8")
    command = ["node", "client.mjs", str(site.driver.run_dir), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_program_is_short() -> None:
    assert sum(1 for line in PROGRAM.splitlines() if line.strip()) <= 46


@needs_node
def test_program_streams_an_answer(demo: Site, tmp_path: Path) -> None:
    done = node(demo, tmp_path, QUESTION)
    assert (done.returncode, done.stderr) == (0, "")
    assert demo.driver is not None
    greedy = demo.driver.generate(messages=[{"role": "user", "content": QUESTION}], max_tokens=50)
    assert done.stdout == f"{greedy.text} {greedy.finish_reason}\n"


@needs_node
def test_program_reports_a_refusal(demo: Site, tmp_path: Path) -> None:
    done = node(demo, tmp_path)  # without a question
    assert done.returncode == 1
    assert "invalid_request: messages[0].content" in done.stderr
