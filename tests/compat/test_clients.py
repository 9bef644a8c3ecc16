"""Third-party clients, each run as its own program against the gateway."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.compat.conftest import node_folder_with, pythons_with
from tests.launch.gateway.conftest import Site
from triptych.protocol.config import DEMO_CHECKPOINT

FOLDER = Path(__file__).with_name("clients")
PATIENCE_S = 280


def run(command: list[str], cwd: Path = FOLDER) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "module"),
    [
        ("openai_client.py", "openai"),
        ("anthropic_client.py", "anthropic"),
        ("litellm_client.py", "litellm"),
        ("langchain_client.py", "langchain_openai"),
        ("guidellm_run.py", "guidellm"),
        ("schemathesis_run.py", "schemathesis"),
    ],
    ids=lambda value: value.partition(".")[0],
)
def test_python_client_works(demo: Site, script: str, module: str) -> None:
    for python in pythons_with(module):
        run([python, "-B", script, demo.url])


@pytest.mark.slow
def test_lm_eval_scores_equal_those_of_its_own_forward_pass(demo: Site) -> None:
    for python in pythons_with("lm_eval"):
        run([python, "-B", "lm_eval_scores.py", demo.url, str(DEMO_CHECKPOINT)])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_node_client_works(demo: Site) -> None:
    run(["node", str(FOLDER / "openai_client.mjs"), demo.url], cwd=node_folder_with("openai"))
