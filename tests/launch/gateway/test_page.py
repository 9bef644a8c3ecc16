"""The commands of docs/http.md do what it says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.gateway.conftest import Site
from triptych.launch.gateway.config import GatewayConfig

PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text(encoding="utf-8")
README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
FENCES = re.findall(r"```(\w*)\n(.*?)```", PAGE + README, re.DOTALL)
BLOCKS = "\n".join(block for language, block in FENCES if not language).replace("\\\n", " ")
COMMANDS = re.findall(r"^curl (?:[^'\n]|'[^']*')*", BLOCKS, re.MULTILINE)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")
@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_a_curl_command_is_answered(demo: Site, number: int) -> None:
    command = COMMANDS[number].replace("http://127.0.0.1:8000", demo.url)
    if "/v1/requests/" in command:
        demo.ask("/v1/completions", prompt="Tell", max_tokens=150, resumable=True, request_id="job7", ignore_eos=True)
    else:
        command = command.replace('"request_id": "job7"', f'"request_id": "page{number}"')
    done = subprocess.run(
        [*shlex.split(command), "-sS", "--fail-with-body"], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b""), done.stdout
    assert done.stdout
    if done.stdout.startswith(b"{"):
        json.loads(done.stdout)


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 8


def test_every_flag_is_on_the_page() -> None:
    flags = {f"`--{name.replace('_', '-')}`" for name in GatewayConfig.__dataclass_fields__}
    assert {flag for flag in flags if flag not in PAGE} <= {"`--http`"}


def test_the_python_of_the_page_runs(demo: Site) -> None:
    [block] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = block.replace("http://127.0.0.1:8000", demo.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout
