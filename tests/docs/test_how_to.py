"""The programs and commands of docs/how-to.md: run where possible, otherwise compared with what they refer to."""

from __future__ import annotations

import configparser
import json
import multiprocessing
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import httpx2
import pytest
from tokenizers import Tokenizer

from tests.adapters import make_nominal_adapter
from tests.docs.pages import (
    Block,
    assert_no_text_is_blank,
    background,
    blocks,
    parse_triptych,
    read,
    run_borrowed,
    shell_environment,
)
from tests.launch.test_processes import run_dir_of, worker
from tests.pipeline.checks import expected
from tests.waiting import eventually
from triptych import Client, Driver
from triptych.launch.gateway.config import GatewayConfig
from triptych.protocol.config import ServiceConfig
from triptych.workers.execute.hash_build import byte_tokenizer_json

ROOT = Path(__file__).parents[2]
FASTAPI, CELERY, POOL, NOTEBOOK, FIXTURE, JOB, CHOICES, BEGUN, VECTORS, JOURNAL, MODELS, ADAPTERS = blocks(
    "how-to.md", "python"
)
SHELL = blocks("how-to.md", "sh")
CALLS = [line for block in SHELL for line in block.text.splitlines()]
FASTAPI_CALLS = [line for block in SHELL if "FastAPI" in block.heading for line in block.text.splitlines()]
[UNIT] = blocks("how-to.md", "ini")
LEAVING_S = 15  # duration of a stop besides the drain: gateways and workers get a few seconds each


def program(block: Block, folder: Path) -> Path:
    path = folder / "program.py"
    path.write_text(block.text.replace('"demo"', '"hash-lm"'))
    return path


def output_of(block: Block, folder: Path) -> str:
    """What the block prints as a program of its own."""
    command, environment = [sys.executable, str(program(block, folder))], shell_environment(folder)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.fixture(scope="module")
def fastapi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, httpx2.Client]]:
    """The application under uvicorn: its process id, and a client of it."""
    folder = tmp_path_factory.mktemp("f")
    program(FASTAPI, folder).rename(folder / "app.py")
    serve = FASTAPI_CALLS[0].replace("8000", "0")
    with background(serve, folder, shell_environment(folder)) as server:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.search(r"running on (http://[\d.:]+)", line)))
        with httpx2.Client(base_url=url, timeout=120, trust_env=False) as http:
            yield server.pid, http
        server.send_signal(signal.SIGINT)
        server.stderr.read()
        assert server.wait(120) == 0


def test_fastapi_streams_an_answer(fastapi: tuple[int, httpx2.Client]) -> None:
    _, http = fastapi
    asked = json.loads(re.search(r"-d '(.*)'", FASTAPI_CALLS[1])[1])  # type: ignore[index]
    assert http.post("/ask", json=asked).text
    assert http.get("/health").json()["status"] == "ok"


def test_fastapi_refuses_with_a_status(fastapi: tuple[int, httpx2.Client]) -> None:
    reply = fastapi[1].post("/ask", json={"text": "hi", "max_tokens": -1})
    assert (reply.status_code, reply.json()["code"], reply.json()["param"]) == (400, "invalid_request", "max_tokens")


def test_fastapi_aborts_the_request_of_a_disconnected_client(fastapi: tuple[int, httpx2.Client]) -> None:
    pid, http = fastapi
    with http.stream("POST", "/ask", json={"text": "hi", "max_tokens": 4000}) as reply:
        next(reply.iter_text())
    with Client(run_dir_of(worker(pid, "execute"))) as watcher:
        eventually(lambda: not watcher.requests().lines)
        assert watcher.requests().ended[0].state == "abort"


class Signal:
    """A Celery signal: it records its listeners."""

    def __init__(self) -> None:
        self.listeners: list[Any] = []

    def connect(self, listener: Any) -> Any:
        self.listeners.append(listener)
        return listener


class Celery:
    """The part of Celery used by the page: a task is a function whose first argument has the request."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def task(self, **_: object) -> Any:
        return lambda function: function


def celery_child(path: Path, task_id: str, answers: Any) -> None:
    """What a forked worker does: load the tasks, call the listeners of the fork signal, run one task."""
    signals = ModuleType("celery.signals")
    signals.worker_process_init = Signal()  # type: ignore[attr-defined]
    package = ModuleType("celery")
    package.Celery = Celery  # type: ignore[attr-defined]
    sys.modules.update({"celery": package, "celery.signals": signals})
    tasks = runpy.run_path(str(path))
    for listener in signals.worker_process_init.listeners:
        listener()
    task = type("Task", (), {"request": type("Request", (), {"id": task_id})})
    answers.put(tasks["answer"](task, "hello"))


def test_celery_children_share_the_pipeline(driver: Driver, tmp_path: Path) -> None:
    path = tmp_path / "tasks.py"
    path.write_text(CELERY.text.replace("/run/triptych", str(driver.run_dir)))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [context.Process(target=celery_child, args=(path, f"task-{i}", answers)) for i in range(2)]
    for child in children:
        child.start()
    texts = [answers.get(timeout=240) for _ in children]
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    assert texts == [driver.generate(messages=[{"role": "user", "content": "hello"}], max_tokens=100).text] * 2


def test_program_that_keeps_its_answers_asks_for_none_twice(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.py"
    path.write_text(JOB.text.replace("/run/triptych", str(driver.run_dir)))
    messages = [{"role": "user", "content": "What does zip do?"}]
    with Client(driver.run_dir) as killed:  # before it stored the answer
        text = killed.generate(request_id="job7-zip", messages=messages, max_tokens=50, keep=True, lease_s=3600).text
    found = runpy.run_path(str(path))
    assert dict(found["table"].execute("SELECT id, text FROM answers"))["job7-zip"] == text
    eventually(lambda: driver.client.status("job7-zip").state == "unknown")
    assert runpy.run_path(str(path))["prompts"] == []


def num_accepted(driver: Driver) -> int:
    """From prepare's last statistics."""
    return int(driver.stats()["prepare"]["accepted"])


def test_redelivered_task_is_not_computed_again() -> None:
    request: dict[str, Any] = {"request_id": "task", "lease_s": 3600, "max_tokens": 100}
    # Its own pipeline, where no other request is counted; and slow, because a completely read answer is forgotten.
    with Driver("hash-lm", max_model_len=256, hash_step_ms=10) as driver:
        with Client(driver.run_dir) as first:
            next(iter(first.submit("hello", **request)))
        with Client(driver.run_dir) as second:
            assert second.generate("hello", **request).text == driver.generate("hello", max_tokens=100).text
        eventually(lambda: num_accepted(driver) > 1)  # including the one that it is compared with, which was last
        assert num_accepted(driver) == 2


@pytest.mark.parametrize("block", [POOL, CHOICES, BEGUN, VECTORS, MODELS], ids=lambda block: block.heading)
def test_program_answers_with_text(block: Block, demo_driver: Driver, tmp_path: Path) -> None:
    assert_no_text_is_blank(run_borrowed(block.text, tmp_path, demo_driver))


class NoDriver:
    """Notes what would run."""

    running: ClassVar[list[str]] = []

    def __init__(self, model: str) -> None:
        self._model = model

    def start(self) -> NoDriver:
        self.running.append(self._model)
        return self

    def stop(self) -> None:
        self.running.remove(self._model)

    def __enter__(self) -> NoDriver:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def test_cell_of_a_notebook_that_runs_again_leaves_one_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.Driver", NoDriver)
    names: dict[str, Any] = {}
    for _ in range(2):
        exec(NOTEBOOK.text, names)
        assert NoDriver.running == ["demo"]
    names["driver"].stop()


def test_fixture_of_a_users_tests_stops_what_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.Driver", NoDriver)
    names: dict[str, Any] = {}
    exec(FIXTURE.text, names)
    yielded = names["driver"]._get_wrapped_function()()
    next(yielded)
    assert NoDriver.running == ["hash-lm"]
    yielded.close()
    assert NoDriver.running == []


def test_model_for_tests_follows_a_form(driver: Driver) -> None:
    pytest.importorskip("llguidance")
    assert driver.generate("Sure?", structured={"choice": ["yes", "no"]}).text in ("yes", "no")


def test_journal_on_disk_is_continued_by_the_next_driver(tmp_path: Path) -> None:
    assert output_of(JOURNAL, tmp_path) == "length\n"


def test_adapter_answers_in_a_program(tmp_path: Path) -> None:
    make_nominal_adapter(tmp_path / "adapters" / "formal")
    output = output_of(ADAPTERS, tmp_path)
    prompt = [byte + 1 for byte in b"hello"]
    texts = [Tokenizer.from_str(byte_tokenizer_json()).decode(expected(prompt, 20, adapter=a)) for a in (1, 0)]
    assert output == "".join(f"{text}\n" for text in texts)


def test_file_of_prompts_continues_after_a_kill(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(300)))
    [call] = [call for call in CALLS if "--resume" in call]
    call = f"{call.replace('200', '20')} --connect {driver.run_dir}"
    environment, answers = shell_environment(tmp_path), tmp_path / "answers.jsonl"
    with background(call, tmp_path, environment) as running:
        eventually(lambda: answers.exists() and answers.read_bytes().count(b"\n") > 3, timeout=120)
        running.kill()
    done = subprocess.run(shlex.split(call), cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stderr.split()[0]) > 3
    assert sorted(json.loads(row)["index"] for row in answers.read_text().splitlines()) == list(range(300))


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)  # some names are repeated
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.text)
    return parser["Service"]


def drain_s(call: str) -> float:
    found = re.search(r"--drain-timeout (\d+)", call)
    return float(found[1]) if found else 20.0


def test_systemd_unit_starts_an_existing_program_and_lets_it_drain() -> None:
    service = unit()
    command = service["ExecStart"].split(maxsplit=1)[1]
    parse_triptych(f"triptych {command}")
    assert f"/run/{service['RuntimeDirectory']} " in command
    assert float(service["TimeoutStopSec"]) >= drain_s(command) + LEAVING_S


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.text.replace("/opt/triptych/bin/triptych", sys.executable).replace("User=triptych\n", "")
    (tmp_path / "triptych.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "triptych.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "triptych" in line]) == (0, [])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_unit_leaves_little_to_an_attacker(tmp_path: Path) -> None:
    (tmp_path / "triptych.service").write_text(UNIT.text)
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=20", "triptych.service"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("systemd is older than 250")
    assert done.returncode == 0, done.stdout[-100:]


def test_limits_of_nginx_are_those_of_the_gateway() -> None:
    [site] = blocks("how-to.md", "nginx")
    found = re.search(r"client_max_body_size (\d+)m;", site.text)
    assert found is not None
    assert int(found[1]) << 20 == GatewayConfig().max_body_bytes
    assert f"`--keep-alive-s` ({GatewayConfig().keep_alive_s:g})" in read("how-to.md")


def test_every_unusual_setting_of_the_unit_is_explained() -> None:
    reasons = read("how-to.md").split("| line | why |")[1]
    needs_none = {"User", "ExecStart", "RuntimeDirectory", "TimeoutStartSec", "Restart"}
    own = UNIT.text.split("UMask=")[0]
    assert {name for name in unit() if name in own and f"`{name}" not in reasons} <= needs_none


def test_container_has_room_for_the_journal_and_time_to_drain() -> None:
    [call] = [call for call in CALLS if call.startswith("docker run")]
    words = shlex.split(call)
    parse_triptych(call[call.index("triptych serve") :])
    service, of_docker, of_others = ServiceConfig(), 64 << 20, 10 << 20  # the board, logs, a tokenizer of its own
    assert f"({service.arena_bytes >> 20} MiB)" in read("how-to.md")
    assert service.arena_bytes + 512 * service.max_records + of_others < of_docker
    assert float(words[words.index("--stop-timeout") + 1]) >= drain_s(call) + LEAVING_S
    [build] = [call for call in CALLS if call.startswith("docker build")]
    assert (ROOT / shlex.split(build)[shlex.split(build).index("--file") + 1]).is_file()
