"""The commands of docs/http.md work as described."""

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
from triptych.launch.gateway import config
from triptych.launch.gateway.errors import error_map
from triptych.protocol.errors import REQUEST_ERRORS

PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text(encoding="utf-8")
README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
SOURCE = "".join(path.read_text(encoding="utf-8") for path in Path(config.__file__).parent.rglob("*.py"))
FENCES = re.findall(r"```(\w*)\n(.*?)```", PAGE + README, re.DOTALL)
BLOCKS = "\n".join(block for language, block in FENCES if not language).replace("\\\n", " ")
COMMANDS = re.findall(r"^curl (?:[^'\n]|'[^']*')*", BLOCKS, re.MULTILINE)


def reply(command: str, demo: Site) -> str:
    """What curl prints."""
    call = shlex.split(command.replace("http://127.0.0.1:8000", demo.url))
    done = subprocess.run([*call, "-sS", "--fail-with-body"], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b""), done.stdout
    return done.stdout.decode()


def text_of_reply(reply: str) -> str:
    """The text of an answer, streamed or complete."""
    events = re.findall(r"^data: (\{.*)", reply, re.MULTILINE) or [reply]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    parts = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    return "".join(part.get("content") or part.get("text") or "" for part in parts)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")
@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_curl_command_gets_an_answer(demo: Site, number: int) -> None:
    own = [command.replace("job7", f"page{number}") for command in COMMANDS]
    command = own[number]
    if "/v1/requests/" in command:
        reply(next(each for each in own if '"resumable"' in each), demo)
    answer = reply(command, demo)
    assert answer
    if answer.startswith("{"):
        json.loads(answer)
    if re.search("completions|requests/", command) and "-X DELETE" not in command:
        assert text_of_reply(answer).strip()


def test_page_has_commands() -> None:
    assert len(COMMANDS) >= 8


def test_every_error_code_is_in_the_table() -> None:
    rows = re.findall(r"^\| (\d{3}) \| (.*?) \|", PAGE, re.MULTILINE)
    table = {(code, int(status)) for status, cell in rows for code in re.findall(r"`(\w+)`", cell)}
    of_pipeline = {(error_map(error(""))["error"]["code"], error.http_status) for error in REQUEST_ERRORS.values()}
    assert of_pipeline <= table
    of_gateway = set(re.findall(r'(?:code=|40[45]: |status_code, )"(\w+)"', SOURCE)) - {"not_found_error"}  # a type
    assert len(of_gateway) > 10
    assert of_gateway - {code for code, _ in table} == set()


def test_python_examples_run(demo: Site) -> None:
    [block] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = block.replace("http://127.0.0.1:8000", demo.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout
