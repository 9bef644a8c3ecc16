"""Verbs as processes: how they start, how they react to signals, and what they leave behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer

from tests.launch.conftest import Triptych
from tests.proc import children_of
from triptych import Client
from triptych.launch.cli import app
from triptych.protocol.errors import PipelineFailed

pytestmark = pytest.mark.timeout(90)

COMMAND = [sys.executable, "-c", "from triptych.launch.cli import main; main()"]
HASH = ["--model", "hash-lm", "--hash-step-ms", "5"]


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A verb as a process, killed at the end if it still runs."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*COMMAND, *arguments], text=True, **pipes) as running:  # type: ignore[call-overload]
        try:
            yield running
        finally:
            running.kill()


@contextmanager
def serving(run_dir: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    run_dir.chmod(0o700)
    with process("serve", *HASH, "--run-dir", str(run_dir), *flags) as server:
        assert server.stderr is not None
        ready = next(line for line in server.stderr if "ready: " in line)
        assert str(run_dir) in ready
        with Client(run_dir) as client:
            yield server, client


def worker(parent: int, role: str) -> int:
    return next(p for p in children_of(parent) if f"workers.{role}\0" in Path(f"/proc/{p}/cmdline").read_text())


def run_dir_of(worker: int) -> Path:
    arguments = Path(f"/proc/{worker}/cmdline").read_text().split("\0")
    return Path(arguments[arguments.index("--run-dir") + 1])


def test_second_signal_stops_at_once(tmp_path: Path) -> None:
    number = signal.SIGINT  # for SIGTERM twice, see the next test; for the first, gateway/serving/test_processes.py
    with serving(tmp_path) as (server, client):
        stream = client.submit("hello", max_tokens=400)
        next(iter(stream))
        server.send_signal(number)
        assert server.stderr is not None
        next(line for line in server.stderr if "draining" in line)
        server.send_signal(number)
        assert server.wait(60) == 1
        assert "requests kept for the next driver: 1" in server.stderr.read()
        with serving(tmp_path):  # the same client continues without noticing
            assert len(stream.result(60).token_ids) == 400


def test_requests_that_no_next_driver_can_resume_are_ended() -> None:
    with process("serve", *HASH) as server:
        assert server.stderr is not None
        ready = next(line for line in server.stderr if "ready: " in line)
        run_dir = Path(ready.split()[-1])
        with Client(run_dir) as client:
            stream = client.submit("hello", max_tokens=3000)
            next(iter(stream))
            for _ in range(2):
                server.send_signal(signal.SIGTERM)
                next((line for line in server.stderr if "draining" in line or "cut short: 1" in line), None)
            assert stream.result(20).finish_reason == "abort"
        assert server.wait(60) == 1
    assert not run_dir.exists()


def test_service_manager_hears_of_the_start_the_work_and_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"\0triptych-test-{os.getpid()}-{tmp_path.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + address[1:])
        with process("serve", *HASH) as server:
            heard = [manager.recv(4096).decode()]
            while "WATCHDOG=1" not in heard:
                heard.append(manager.recv(4096).decode())
            server.send_signal(signal.SIGTERM)
            while heard[-1] != "STOPPING=1":
                heard.append(manager.recv(4096).decode())
            assert server.wait(60) == 0
    assert heard[0] == "READY=1"
    assert {message.partition("=")[0] for message in heard} <= {"READY", "STATUS", "WATCHDOG", "STOPPING"}


def test_draining_ends_at_its_timeout(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-timeout", "0.2") as (server, client):
        stream = client.submit("hello", max_tokens=3000)
        next(iter(stream))
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 1


def test_server_reports_its_work_and_that_it_gave_up_until_it_is_stopped(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-restarts", "0") as (server, client):
        stream = client.submit("hello", max_tokens=3000)
        assert server.stderr is not None
        line = next(line for line in server.stderr if "tok/s" in line)
        assert re.search(r" \d+ tok/s · \d+ prompt tok/s · 1 live · 0 waiting · ", line)
        os.kill(worker(server.pid, "execute"), signal.SIGABRT)
        with pytest.raises(PipelineFailed):
            stream.result(20)
        with pytest.raises(PipelineFailed):
            client.submit("hello").result(20)
        assert client.stats()["summarize"]["phase"] == "ready"
        next(line for line in server.stderr if "nothing is served any more" in line)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 3


def test_missing_model_is_one_clear_line() -> None:
    with process("generate", "hi", "--model", "/no/such/model") as running:
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "error: execute: model directory /no/such/model does not exist\n" in errors


# For SIGTERM, see test_run_batch.py.
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signal_ends_generate_and_leaves_nothing(number: signal.Signals, code: int) -> None:
    with process("generate", "hi", *HASH, "--max-tokens", "3000", "--stream") as running:
        assert running.stdout is not None
        assert running.stdout.read(1)
        children = children_of(running.pid)
        run_dir = run_dir_of(children[0])
        assert run_dir.exists()
        running.send_signal(number)
        _, errors = running.communicate(timeout=20)
    assert running.returncode == code
    assert len(children) == 5  # workers, and what forks them
    assert "Traceback" not in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert not run_dir.exists()


def test_ctrl_c_ends_an_answer_and_not_the_chat() -> None:
    with process("chat", *HASH, "--max-tokens", "3000") as running:
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write("hello\n")
        running.stdin.flush()
        assert running.stdout.read(1)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate("/stats\n", timeout=20)
    assert running.returncode == 0
    assert "= wall" in errors


def test_closed_pipe_ends_generate_quietly() -> None:
    with process("generate", "hi", *HASH, "--max-tokens", "3000", "--stream") as running:
        assert running.stdout is not None
        assert running.stdout.read(1)
        running.stdout.close()
        assert running.wait(60) == 141
        assert running.stderr is not None
        assert running.stderr.read() == ""


VERBS = [*typer.main.get_command(app).commands]  # type: ignore[attr-defined]
MAX_HELP_SHARE = 2.5  # relative to the processor time of importing typer; usually 0.7 to 1.4, with 0.3 s for both
HEAVY = ("torch", "transformers", "numpy", "zmq", "msgpack", "matplotlib", "fastapi", "uvicorn", "pydantic", "asyncio")


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    """For every verb, in one process: the first one pays for the imports of all."""
    code = """
import json, sys, time
start = time.process_time()
import typer.rich_utils
floor = time.process_time() - start
begun = time.process_time()
from triptych.launch.cli import main
loaded = time.process_time() - begun
verbs, heavy = json.loads(sys.argv[1])
found = {}
for verb in verbs:
    begun = time.process_time()
    try: main([*verb.split(), "--help"])
    except SystemExit: pass
    share = (loaded + time.process_time() - begun) / floor
    found[verb] = share, [name for name in heavy if name in sys.modules]
print(json.dumps(found), file=sys.stderr)
"""
    command = [sys.executable, "-c", code, json.dumps([["", *VERBS], HEAVY])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, tuple[float, list[str]]] = json.loads(done.stderr)
    assert {verb: heavy for verb, (_, heavy) in found.items() if heavy} == {}
    assert {verb: share for verb, (share, _) in found.items() if share >= MAX_HELP_SHARE} == {}
    assert len(found) == 1 + len(VERBS)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("triptych ser", ["serve"]), ("triptych serve --page", ["--page-size"]), ("triptych b", ["bench"])],
)
def test_shell_completes_verbs_and_flags(words: str, expected: list[str]) -> None:
    asked = {"_TRIPTYCH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "import sys; sys.argv[0] = 'triptych'; from triptych.launch.cli import main; main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert done.stdout.split() == expected


def test_info_shows_the_model_and_a_running_pipeline(triptych: Triptych, run_dir: str) -> None:
    facts = json.loads(triptych("info", "--connect", run_dir, "--json").out)
    assert facts["model"]["model"] == "hash-lm"
    assert set(facts["statistics"]) == {"prepare", "execute", "summarize"}
    started = time.monotonic()
    facts = json.loads(triptych("info", "hash-lm", "--json", "--page-size", "32").out)
    assert (facts["model"]["page_size"], "statistics" in facts) == (32, False)
    assert facts["config"]["cache"]["page_size"] == 32
    assert facts["tokenizer"]["vocab_size"] == facts["model"]["vocab_size"]
    assert re.fullmatch("[0-9a-f]{16}", facts["tokenizer"]["id"])
    assert facts["startup_s"]["execute"]["starting"] > 0
    assert {"triptych", "protocol", "python", "torch", "pyzmq"} <= facts["versions"].keys()
    assert {"cpu", "cpus", "cpu_features", "memory_bytes", "gpus"} <= facts["machine"].keys()
    tables = triptych("info", "--connect", run_dir).out
    for words in ("max num seqs", "max open files", "Tokenizer", "Start-up, s", "Config: cache", "Machine", "Versions"):
        assert words in tables
    assert time.monotonic() - started < 20


def test_version_is_that_of_the_package(triptych: Triptych) -> None:
    from triptych import __version__

    assert triptych("--version") == (0, f"triptych {__version__}\n", "")


def test_demo_succeeds_with_a_model_without_weights() -> None:
    command = [sys.executable, "-m", "triptych.launch.demo", "--model", "hash-lm"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "The answer is identical to the first one" in result.stdout
    assert re.search(r"pages: \d+ of 4096 free, \d+ cached, 0 lost", result.stdout)
