"""How commands of the same user talk to the driver."""

from __future__ import annotations

import json
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import eventually
from triptych.driver import control
from triptych.driver.control import ControlServer, ask
from triptych.protocol.errors import ConfigError
from triptych.protocol.run_dir import control_path


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connection_without_a_free_file_descriptor_is_served_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = ControlServer(tmp_path, {"health": lambda: "well"})
    with socket.socket(socket.AF_UNIX) as first:
        with no_descriptor_left():
            first.connect(str(control_path(tmp_path)))
            first.sendall(b'{"ask": "health"}\n')
            eventually(lambda: "cannot accept control connections" in caplog.text)
        assert first.recv(100) == b'{"ok": "well"}\n'
    assert ask(tmp_path, "health") == "well"
    server.close()


def test_asking_process_that_exits_early_does_not_end_the_driver(tmp_path: Path) -> None:
    """Even if the host program lets SIGPIPE end it, as programs that write to pipes often do."""
    pipes, may_answer = list[int](), threading.Event()
    server = ControlServer(tmp_path, {"health": may_answer.wait})
    before = signal.signal(signal.SIGPIPE, lambda number, _: pipes.append(number))
    try:
        with socket.socket(socket.AF_UNIX) as leaving:
            leaving.connect(str(control_path(tmp_path)))
            leaving.sendall(b'{"ask": "health"}\n')
        may_answer.set()
        assert ask(tmp_path, "health") is True
    finally:
        signal.signal(signal.SIGPIPE, before)
        server.close()
    assert pipes == []


def test_slow_question_blocks_no_other_and_is_answered_before_the_end(tmp_path: Path) -> None:
    begun, may_answer, answers = threading.Event(), threading.Event(), list[object]()

    def load() -> bool:
        begun.set()
        return may_answer.wait(60)

    server = ControlServer(tmp_path, {"load": load, "health": lambda: "well"})
    asker = threading.Thread(target=lambda: answers.append(ask(tmp_path, "load")))
    asker.start()
    assert begun.wait(60)
    assert ask(tmp_path, "health") == "well"
    closer = threading.Thread(target=server.close)
    closer.start()
    eventually(lambda: not control_path(tmp_path).exists())
    assert closer.is_alive()
    may_answer.set()
    for thread in (closer, asker):
        thread.join(20)
    assert answers == [True]


def test_excess_concurrent_questions_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_QUESTIONS", 1)
    begun, may_answer, answers = threading.Semaphore(0), threading.Event(), list[object]()

    def load() -> bool:
        begun.release()
        return may_answer.wait(60)

    server = ControlServer(tmp_path, {"load": load})
    askers = [threading.Thread(target=lambda: answers.append(ask(tmp_path, "load"))) for _ in range(4)]
    for asker in askers:
        asker.start()
    assert all(begun.acquire(timeout=20) for _ in range(2)), "the second one by the listening thread"
    assert not begun.acquire(blocking=False)
    may_answer.set()
    for asker in askers:
        asker.join(20)
    server.close()
    assert answers == [True] * 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"health\n", "a question is a line of JSON, got b'health"),
        (b"\xff\n", "a question is a line of JSON"),
        (b"[" * 8000 + b"\n", "a question is a line of JSON"),
        (b"[]\n", 'a question is a map with "ask", got b\'[]'),
        (b'{"ask": 5}\n', 'a question is a map with "ask"'),
        (b'{"ask": "wealth"}\n', "unknown question 'wealth', known are: health, restart"),
        (b'{"ask": "restart"}\n', "wrong fields for restart: missing a required argument: 'role'"),
        (b'{"ask": "restart", "role": "execute", "when": 5}\n', "got an unexpected keyword argument 'when'"),
        (b"x" * 9000 + b"\n", "a question or an answer has more than 8192 bytes"),
    ],
)
def test_malformed_question_gets_an_error_and_is_not_logged_as_our_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: bytes, message: str
) -> None:
    server = ControlServer(tmp_path, {"health": lambda: "well", "restart": lambda role: role})
    try:
        with socket.socket(socket.AF_UNIX) as asker:
            asker.connect(str(control_path(tmp_path)))
            asker.sendall(line)
            assert message in json.loads(asker.makefile().readline())["error"]
        assert ask(tmp_path, "restart", role="execute") == "execute"
    finally:
        server.close()
    assert caplog.text == ""


def test_incomplete_question_times_out_with_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "QUESTION_S", 0.1)
    server = ControlServer(tmp_path, {})
    try:
        with socket.socket(socket.AF_UNIX) as asker:
            asker.connect(str(control_path(tmp_path)))
            asker.sendall(b'{"ask": "hea')
            assert json.loads(asker.makefile().readline()) == {"error": "no question arrived within 0.1 s"}
    finally:
        server.close()
    assert caplog.text == ""


def test_driver_that_does_not_answer_is_an_error_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "ANSWER_S", 0.1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(control_path(tmp_path)))
        silent.listen()
        with pytest.raises(ConfigError, match=rf"^the driver of {tmp_path} did not answer within 0.1 s$"):
            ask(tmp_path, "health")


@pytest.mark.parametrize("fails", [True, False])
def test_long_reply_arrives_completely(tmp_path: Path, fails: bool) -> None:
    """The error of a worker that does not start contains forty lines, of any length."""
    text = "why \n" * 50_000

    def health() -> str:
        if fails:
            raise ConfigError(text)
        return text

    server = ControlServer(tmp_path, {"health": health})
    try:
        if fails:
            with pytest.raises(ConfigError) as caught:
                ask(tmp_path, "health")
            assert caught.value.message == text
        else:
            assert ask(tmp_path, "health") == text
    finally:
        server.close()
