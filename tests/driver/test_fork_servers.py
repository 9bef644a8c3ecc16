"""Workers are forked where they can be, are like others, and are started in any case."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.pipeline.checks import expected
from tests.pipeline.killing import kill
from tests.proc import children_of, fork_servers_of, is_alive
from tests.waiting import eventually
from triptych import Driver
from triptych.driver import fork_servers, processes
from triptych.driver.fork_servers import GROUPS, ForkServer
from triptych.driver.processes import ForkedProcess
from triptych.driver.upgrade import Installation
from triptych.protocol.board import ROLES
from triptych.protocol.config import PipelineConfig
from triptych.protocol.run_dir import CONFIG_FILE

pytestmark = pytest.mark.usefixtures("own_servers")


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "triptych.driver")


def servers(driver: Driver) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in fork_servers_of(driver.run_dir)]


def starts(caplog: pytest.LogCaptureFixture) -> list[str]:
    """``forked execute`` or ``started execute``, for each start that was logged so far, just after its id was known."""
    return [found[0] for record in caplog.records if (found := re.match(r"(forked|started) \w+", record.getMessage()))]


def facts(driver: Driver, role: str) -> dict[str, Any]:
    """What can be told about a worker."""
    process, run_dir = psutil.Process(driver.pids[role]), driver.run_dir
    pid, folder = process.pid, Path(f"/proc/{process.pid}")
    status = (folder / "status").read_text().splitlines()
    files = [
        re.sub(r"\d+", "", file.readlink().as_posix().replace(str(run_dir), "")) for file in (folder / "fd").iterdir()
    ]
    return {
        "command": " ".join(process.cmdline()).rstrip().replace(str(run_dir), "DIR"),
        "name": process.name(),
        "parent": process.ppid(),
        "session and group": (os.getsid(pid) == pid, os.getpgid(pid) == pid),
        "folder": process.cwd(),
        "status": [
            line for line in status if line.startswith(("Umask", "Sig", "Uid", "Gid", "Cap", "NoNew", "Cpus_al"))
        ],
        "limits": (folder / "limits").read_text(),
        "OOM": (folder / "oom_score_adj").read_text(),
        "files": sorted(files),
        "standard files": [(folder / f"fd/{number}").readlink().name for number in range(3)],
    }


def test_forked_worker_is_like_one_that_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        monkeypatch.setenv(f"LARGE{number}", "x" * 100_000)  # together, they are too much for a packet
    with Driver("hash-lm") as forked, Driver("hash-lm", fork_workers=False) as started:
        assert [words.split()[0] for words in starts(caplog)] == ["forked"] * 3 + ["started"] * 3
        for driver in (forked, started):
            assert driver.generate([1, 2], max_tokens=3).token_ids == expected([1, 2], 3)
        for role in ROLES:
            eventually(lambda role=role: facts(forked, role) == facts(started, role))  # type: ignore[misc]


def test_worker_outlives_its_server_and_is_replaced_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fork_servers, "FIRST_RETRY_S", 0.1)
    monkeypatch.setattr(fork_servers, "FORK_S", 60.0)  # on a machine so busy that it takes a second, too
    with Driver("hash-lm", lease_s=30.0) as driver:
        before, old = driver.pids, servers(driver)
        assert len(old) == len(GROUPS)
        for server in old:
            server.kill()
        eventually(lambda: caplog.text.count("has ended (exit code -9)") == len(GROUPS))
        assert driver.pids == before
        kill(driver, "prepare")
        assert driver.generate([1, 2], max_tokens=3).token_ids == expected([1, 2], 3)
        eventually(lambda: driver.healthy and caplog.text.count("is ready after") == 2 * len(GROUPS))
        for role in ROLES:
            kill(driver, role)
        eventually(lambda: starts(caplog)[-len(ROLES) :] == [f"forked {role}" for role in ROLES])


def test_stopped_server_delays_a_start_for_a_moment_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Driver("hash-lm") as driver:
        monkeypatch.setattr(fork_servers, "FORK_S", 0.1)
        old = servers(driver)
        for server in old:
            server.suspend()
        for role in ("execute", "prepare"):
            kill(driver, role)
        eventually(lambda: starts(caplog)[-2:] == ["started execute", "started prepare"])
        eventually(lambda: not any(map(is_alive, [server.pid for server in old])))
        eventually(lambda: driver.healthy and len(servers(driver)) == len(GROUPS))


def test_server_that_is_stopped_during_its_imports_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    start = processes.start_process

    def start_stopped(*arguments: Any, **options: Any) -> Any:
        process = start(*arguments, **options)
        process.send_signal(signal.SIGSTOP)
        return process

    monkeypatch.setattr(fork_servers, "start_process", start_stopped)
    with Driver("hash-lm") as driver:
        assert driver.generate([1, 2], max_tokens=3).token_ids == expected([1, 2], 3)
        stopped = [server.pid for server in servers(driver)]
        assert len(stopped) == len(GROUPS)
    assert not any(map(is_alive, stopped))


def test_server_that_fails_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fork_servers, "_SERVER", "nowhere")
    monkeypatch.setattr(fork_servers, "FIRST_RETRY_S", 0.0)
    with Driver("hash-lm") as driver:
        eventually(lambda: caplog.text.count("No module named triptych.workers.nowhere") == len(GROUPS))
        kill(driver, "execute")
        eventually(lambda: driver.healthy)
        assert (driver._running().supervisor._forks.are_due(), servers(driver)) == (False, [])


def test_no_server_of_another_version_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_servers, "FIRST_RETRY_S", 0.0)
    looks: list[Installation] = []

    def look(installation: Installation) -> str:
        looks.append(installation)
        return "99.0"

    with Driver("hash-lm") as driver:
        monkeypatch.setattr(Installation, "upgraded_to", look)
        for server in servers(driver):
            server.kill()
        eventually(lambda: len(looks) > 3)
        assert servers(driver) == []
        assert driver.healthy


def test_drivers_without_servers_have_none(caplog: pytest.LogCaptureFixture) -> None:
    with Driver("hash-lm", fork_workers=False) as driver:
        kill(driver, "prepare")
        assert driver.generate([1, 2], max_tokens=3).token_ids == expected([1, 2], 3)
        assert servers(driver) == []
        assert "forked" not in caplog.text


def test_server_that_cannot_be_started_does_not_prevent_a_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise BlockingIOError("no process left")

    monkeypatch.setattr(fork_servers, "start_process", fail)
    with Driver("hash-lm") as driver:
        assert driver.generate([1, 2], max_tokens=3).token_ids == expected([1, 2], 3)
    assert "no fork server could be started: no process left" in caplog.text


# -- one server, without a driver


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    (tmp_path / CONFIG_FILE).write_text(PipelineConfig.from_options(model="hash-lm").to_json())
    server = ForkServer(tmp_path, ("prepare",), cwd=None)
    assert server.receive()
    yield server
    server.end()


def fork(server: ForkServer, code: str = "sys.stdin.read()") -> ForkedProcess | None:
    with open(os.devnull) as nothing:
        return server.fork(["tests.driver.one_line", code], dict(os.environ), [nothing.fileno(), 2])


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("os.abort()", -signal.SIGABRT),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("sys.exit(7)", 7),
        ("1 / 0", 1),
        ("pass", 0),
    ],
)
def test_exit_code_of_a_forked_process_is_known(server: ForkServer, code: str, exit_code: int) -> None:
    process = fork(server, code)
    assert process is not None
    assert process.wait() == process.poll() == exit_code
    process.kill()  # it has ended, and its number may be another's by now


@pytest.mark.parametrize("moment", ["before", "during"])
def test_server_that_is_killed_leaves_a_process_that_is_known_or_none(
    server: ForkServer, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, send = server._process.pid, socket.send_fds
    before = set(children_of(os.getpid()))

    def send_and_kill(*arguments: Any) -> Any:
        sent = send(*arguments)
        os.kill(pid, signal.SIGKILL)
        return sent

    if moment == "before":
        os.kill(pid, signal.SIGKILL)
        server._process.wait()
    else:
        monkeypatch.setattr(socket, "send_fds", send_and_kill)
    process = fork(server)
    new = set(children_of(os.getpid())) - before
    assert new == (set() if process is None else {process.pid})
    if process is not None:
        process.kill()
        assert process.wait() in (0, -signal.SIGKILL)


def test_process_that_was_not_waited_for_ends(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped just when it was forked, and another one has been started in its place."""
    known: list[int] = []

    def receive_and_give_up(worker: socket.socket) -> None:
        known.append(int(worker.recv(32)))

    monkeypatch.setattr(server, "_await_greeting", receive_and_give_up)
    assert fork(server) is None
    _, status = os.waitpid(known[0], 0)
    assert os.waitstatus_to_exitcode(status) == 1


def test_process_that_ends_before_it_is_known_is_waited_for(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, send = set(children_of(os.getpid())), socket.send_fds

    def send_without_socket(channel: socket.socket, words: list[bytes], files: list[int]) -> None:
        send(channel, words, [*files[:2], files[3], files[3]])  # a process that is to answer into a file fails

    with monkeypatch.context() as patch:
        patch.setattr(socket, "send_fds", send_without_socket)
        assert fork(server) is None
    [unknown] = eventually(lambda: set(children_of(os.getpid())) - before)
    eventually(lambda: not is_alive(unknown))
    process = fork(server, "pass")
    assert process is not None
    assert set(children_of(os.getpid())) - before == {process.pid}
    assert process.wait() == 0


def test_process_that_says_nothing_ends_with_its_server(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    before, send = set(children_of(os.getpid())), socket.send_fds
    kept: list[int] = []
    ours, full = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with suppress(BlockingIOError):
        while True:
            full.send(b"x", socket.MSG_DONTWAIT)

    def send_full(channel: socket.socket, words: list[bytes], files: list[int]) -> None:
        kept.append(os.dup(files[2]))  # the driver goes on to wait for an answer
        send(channel, words, [*files[:2], full.fileno(), files[3]])
        eventually(lambda: set(children_of(os.getpid())) - before)

    monkeypatch.setattr(socket, "send_fds", send_full)
    with ours, full, monkeypatch.context() as patch:
        patch.setattr(fork_servers, "FORK_S", 0.01)
        assert fork(server) is None
    os.close(*kept)
    server.end()
    assert set(children_of(os.getpid())) < before


def test_half_a_request_is_none(server: ForkServer) -> None:
    """A driver that is killed while it asks takes its server with it, and no process is left."""
    before = set(children_of(os.getpid()))
    server.channel.shutdown(socket.SHUT_WR)
    assert server._process.wait() == 0
    assert set(children_of(os.getpid())) < before
