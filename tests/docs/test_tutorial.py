"""Every command and program of docs/tutorial.md, in its order, in a shell."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import Block, background, blocks, borrowed, shell_environment
from tests.ports import free_port
from tests.waiting import eventually
from triptych import Driver
from triptych.protocol.config import DEMO_CHECKPOINT

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not (shutil.which("curl") and shutil.which("pgrep")), reason="curl or pgrep is not here"),
]

[ANSWER, SERVE, STREAM, CONNECT, LOOK, OWN, START, ASK, SLOW, CALM, DISTURBED, KILL, COMPARE] = blocks(
    "tutorial.md", "sh"
)
[PROGRAM] = blocks("tutorial.md", "python")


class Terminal:
    """A shell in its own folder, with free ports and another run directory than on the page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The hash LM starts in a moment. It never ends an answer by itself, so its context is short.
        self.environment = shell_environment(folder, TRIPTYCH_MODEL="hash-lm", TRIPTYCH_MAX_MODEL_LEN="256")
        run_dir = str(folder / "run")
        self._changes = {"/tmp/tutorial": run_dir, ":8000": f":{free_port()}", "8001": str(free_port())}

    def text(self, block: Block) -> str:
        # A shorter answer, which is still long enough to kill a process in its middle.
        text = block.text.replace("hash_step_ms=15", "hash_step_ms=2").replace("900", "200")
        for old, new in self._changes.items():
            text = text.replace(old, new)
        return text

    def run(self, block: Block) -> str:
        """The output. Like an interactive shell: pgrep -f must not find the shell's own arguments."""
        done = subprocess.run(
            ["bash", "-e"], input=self.text(block), cwd=self.folder, env=self.environment,
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    return Terminal(tmp_path_factory.mktemp("t"))


@pytest.fixture(scope="module")
def service(terminal: Terminal) -> Iterator[Terminal]:
    """The embedded service of the page with the slow model, in the first terminal."""
    (terminal.folder / "service.py").write_text(terminal.text(PROGRAM))
    terminal.run(SLOW)
    with background(terminal.text(START), terminal.folder, terminal.environment) as process:
        eventually(lambda: process.poll() is None and _answers(terminal.text(CALM)), timeout=120)
        yield terminal
        process.send_signal(signal.SIGINT)
        process.wait(120)


def _answers(curl: str) -> bool:
    [address] = re.findall(r"http://127.0.0.1:(\d+)", curl)
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(address))) == 0


def test_an_answer(terminal: Terminal) -> None:
    assert terminal.run(ANSWER)


def test_a_service(terminal: Terminal) -> None:
    with background(terminal.text(SERVE), terminal.folder, terminal.environment) as server:
        assert server.stderr is not None
        next(line for line in server.stderr if "ready: " in line)
        assert terminal.run(STREAM).endswith("data: [DONE]\n\n")
        assert terminal.run(CONNECT)
        look = terminal.run(LOOK)
        assert '"status":"ok"' in look
        assert "summarize" in look
        server.send_signal(signal.SIGINT)
        server.stderr.read()
        assert server.wait(120) == 0


@pytest.mark.skipif(not DEMO_CHECKPOINT.exists(), reason="the demo checkpoint is not here")
def test_a_model_in_a_directory(terminal: Terminal) -> None:
    (terminal.folder / "models").mkdir()
    (terminal.folder / "models" / "own").symlink_to(DEMO_CHECKPOINT)
    assert terminal.run(OWN) == "Return the number of items in a container.\n"


def test_a_service_of_your_own(terminal: Terminal, demo_driver: Driver) -> None:
    command = shlex.join(borrowed(terminal.text(PROGRAM), terminal.folder, demo_driver))
    with background(command, terminal.folder, terminal.environment) as process:
        eventually(lambda: process.poll() is None and _answers(terminal.text(ASK)))
        assert terminal.run(ASK) == "Return the number of items in a container."
        process.send_signal(signal.SIGINT)
        assert (process.wait(60), process.stderr and process.stderr.read().partition("Traceback")[1]) == (0, "")


def test_answer_lasts_long_enough_to_type_a_kill() -> None:
    [num_tokens] = re.findall(r"max_tokens=(\d+)", PROGRAM.text)
    [step_ms] = re.findall(r"hash_step_ms=(\d+)", SLOW.text)
    assert int(num_tokens) * int(step_ms) >= 10_000


def test_kill_9(service: Terminal) -> None:
    service.run(CALM)
    disturbed = service.folder / "disturbed.txt"
    with background(service.text(DISTURBED), service.folder, service.environment) as stream:
        eventually(lambda: disturbed.exists() and disturbed.stat().st_size > 100)
        service.run(KILL)
        size_at_kill = disturbed.stat().st_size
        assert stream.wait(240) == 0
    assert disturbed.stat().st_size > size_at_kill
    assert service.run(COMPARE) == "the same\n"
