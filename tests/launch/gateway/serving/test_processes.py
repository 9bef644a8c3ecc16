"""Gateway processes under ``serve`` are started, watched, restarted, and stopped without losing an answer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

from tests.launch.gateway.conftest import site
from tests.launch.gateway.sse import events, text_of
from tests.launch.gateway.test_edge import head_of, raw
from tests.launch.test_processes import serving
from tests.proc import children_of, is_alive
from tests.waiting import eventually
from triptych import Driver
from triptych.launch.gateway.config import GatewayConfig
from triptych.launch.gateway.serving import processes, server
from triptych.launch.gateway.serving.address import URL_FILE, is_served
from triptych.launch.gateway.serving.processes import gateways, listening_for
from triptych.launch.gateway.settings import Settings
from triptych.protocol import starvation

PATH = "/v1/completions"
POPEN = subprocess.Popen


def gateway_pids(parent: int | None = None) -> list[int]:
    """Gateways that ``parent`` started, by default this process."""
    found = children_of(parent or os.getpid())
    return [p for p in found if "triptych.launch.gateway" in Path(f"/proc/{p}/cmdline").read_text().split("\0")]


def connected(url: str) -> httpx2.Client:
    return httpx2.Client(base_url=url, timeout=60, trust_env=False)


@contextmanager
def served(driver: Driver, **options: object) -> Iterator[httpx2.Client]:
    config = GatewayConfig(**{"http": ":0", **options})  # type: ignore[arg-type]
    with listening_for(config) as listener, gateways(config, listener, driver.run_dir, log_level="error") as url:
        assert url is not None
        assert (driver.run_dir / URL_FILE).read_text() == url
        with connected(url) as http:
            yield http
    assert gateway_pids() == []


def test_several_processes_share_one_address(pipeline: Driver) -> None:
    with served(pipeline, http_workers=2) as http:
        eventually(lambda: len(gateway_pids()) == 2)
        assert http.post(PATH, json={"prompt": "hi", "max_tokens": 2}).status_code == 200
        eventually(lambda: 'gateway="1"' in http.get("/metrics").text)


def test_dead_gateway_is_restarted_and_connections_wait_for_it(
    pipeline: Driver, capfd: pytest.CaptureFixture[str]
) -> None:
    """And one that crashed shows where it was."""
    with served(pipeline) as http:
        assert http.get("/version").status_code == 200
        for number in (signal.SIGKILL, signal.SIGSEGV):
            [pid] = gateway_pids()
            os.kill(pid, number)
            with connected(str(http.base_url)) as other:
                assert other.post(PATH, json={"prompt": "hi", "max_tokens": 2}).status_code == 200
    assert "Fatal Python error: Segmentation fault" in capfd.readouterr().err


def test_gateway_that_cannot_be_started_is_retried(pipeline: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError(errno.EAGAIN, "no more processes")] * 2
    pipes = open_pipes()

    def popen(*arguments: object, **options: object) -> object:
        if failures:
            raise failures.pop()
        return POPEN(*arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr("triptych.launch.gateway.serving.processes.subprocess.Popen", popen)
    with served(pipeline) as http:
        assert http.get("/version").status_code == 200
    assert not failures
    assert open_pipes() == pipes


def open_pipes() -> set[str]:
    """Pipes open in this process."""
    links = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed already
            links.add(os.readlink(file))
    return {link for link in links if link.startswith("pipe:")}


def test_new_gateway_hides_its_keys_opens_all_files_and_forgets_earlier_metrics(pipeline: Driver) -> None:
    earlier = pipeline.run_dir / "gateway-7.json"
    earlier.write_text('{"requests": [["/v1/models", "200", 5]], "seconds": {}, "open": 0, "disconnects": 0}')
    key = "open sesame"
    with served(pipeline, api_key=key) as http:
        assert 'gateway="7"' not in http.get("/metrics", headers={"Authorization": f"Bearer {key}"}).text
        [pid] = gateway_pids()
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert soft == hard
        shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert b"sesame" not in shown
    assert not earlier.exists()
    assert "sesame" not in repr(GatewayConfig(api_key=key))


def test_gateway_without_processor_time_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on an overloaded machine, where every start would take longer than it may and be followed by another one."""
    waited_ns: list[int] = []

    def run_delays(_: int) -> dict[int, int]:
        waited_ns.append(min(len(waited_ns), 20) * 10_000_000)  # as long as it is silent, for the first twenty looks
        return {1: waited_ns[-1]}

    monkeypatch.setattr(starvation, "run_delays", run_delays)
    monkeypatch.setattr(processes, "LOOK_S", 0.01)
    monkeypatch.setattr(processes, "START_S", 0.05)
    pulse, childs_end = os.pipe()
    with subprocess.Popen(["sleep", "60"]) as silent, socket.socket() as listener:
        watcher = processes._Process(GatewayConfig(), tmp_path, index=0, listener=listener, log_level="error")
        watcher._watch(silent, pulse)
        assert silent.wait() < 0, "killed"
    assert len(waited_ns) > 20
    os.close(pulse)
    os.close(childs_end)


def test_gateway_of_a_program_with_thousands_of_files_is_watched(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    try:
        silent, childs_end = os.pipe()
        os.close(childs_end)
        pulse = fcntl.fcntl(silent, fcntl.F_DUPFD, 1024)
        os.close(silent)
        with subprocess.Popen(["true"]) as process, socket.socket() as listener, open(pulse, "rb"):
            watcher = processes._Process(GatewayConfig(), tmp_path, index=0, listener=listener, log_level="error")
            watcher._watch(process, pulse)
            assert process.wait() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_stream_is_resumed_after_its_gateway_was_killed(slow: Driver) -> None:
    with served(slow) as http:
        body = {"prompt": "hi", "max_tokens": 200, "temperature": 0, "stream": True, "resumable": True}
        with http.stream("POST", PATH, json=body) as reply:
            reading = events(reply)
            first = [next(reading) for _ in range(10)]
            os.kill(gateway_pids()[0], signal.SIGKILL)
            with pytest.raises(httpx2.HTTPError):
                list(reading)
        kept = f"/v1/requests/{first[0].data['id']}"
        with http.stream("GET", kept, params={"offset": first[-1].id}) as reply:
            found = list(events(reply))
        http.delete(kept)  # otherwise it stays for a lease, and other tests with this pipeline find it
        whole = http.post(PATH, json={**body, "stream": False, "resumable": False}).json()
        assert text_of(first) + text_of(found) == whole["choices"][0]["text"]


def test_gateways_die_with_their_supervisor(tmp_path: Path) -> None:
    with serving(tmp_path, "--http", ":0") as (server, _):
        [pid] = eventually(lambda: gateway_pids(server.pid))
        server.kill()
        eventually(lambda: not is_alive(pid))


def test_first_signal_lets_requests_finish(tmp_path: Path) -> None:
    with serving(tmp_path, "--http", ":0") as (server, client):
        assert server.stderr is not None
        url = (tmp_path / URL_FILE).read_text()
        body = {"prompt": "hi", "max_tokens": 150, "temperature": 0, "stream": True}
        with (
            httpx2.Client(base_url=url, timeout=60, trust_env=False) as http,
            http.stream("POST", PATH, json=body) as r,
        ):
            reading, stream = events(r), client.submit("hello", max_tokens=150)
            first = next(reading)
            next(iter(stream))
            server.send_signal(signal.SIGTERM)
            with ThreadPoolExecutor(1) as pool:
                log = pool.submit(server.stderr.read)
                *_, end, done = [first, *reading]
                assert len(stream.result(20).token_ids) == 150
        assert (end.data["choices"][0]["finish_reason"], done.data) == ("length", "[DONE]")
        assert server.wait(60) == 0
        assert "draining for at most 20 s, requests left: 2" in log.result()


def test_second_signal_tells_clients_that_they_were_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path, "--http", ":0") as (server, _):
        assert server.stderr is not None
        url = (tmp_path / URL_FILE).read_text()
        body = {"prompt": "hi", "max_tokens": 3900, "stream": True}
        with (
            httpx2.Client(base_url=url, timeout=60, trust_env=False) as http,
            http.stream("POST", PATH, json=body) as r,
        ):
            reading = events(r)
            next(reading)
            server.send_signal(signal.SIGTERM)
            next(line for line in server.stderr if "draining" in line)
            server.send_signal(signal.SIGTERM)
            *_, error, done = reading
        assert (error.data["error"]["code"], done.data) == ("stopped", "[DONE]")
        assert "send others again" in error.data["error"]["message"]  # most cannot be resumed
        server.stderr.read()
        assert server.wait(60) == 1  # one request is left to the next driver


def test_address_is_closed_while_the_last_requests_end(pipeline: Driver) -> None:
    found: list[list[int]] = []
    body = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
    with ExitStack() as later, served(pipeline) as http, socket.socket() as client:
        where = (http.base_url.host, http.base_url.port)
        assert http.get("/version").status_code == 200  # it has started, which may take as long as a hang
        os.kill(execute := pipeline.pids["execute"] or 0, signal.SIGSTOP)  # so that the answer takes until the end
        later.callback(os.kill, execute, signal.SIGCONT)
        client.connect(where)
        client.sendall(head_of(len(body)) + body)
        eventually(lambda: pipeline.stats()["prepare"]["live"] == 1)

        def go_on_when_refused() -> None:
            eventually(lambda: connect(where) == errno.ECONNREFUSED)
            found.append(gateway_pids())
            os.kill(execute, signal.SIGCONT)

        going_on = threading.Thread(target=go_on_when_refused)
        going_on.start()
    going_on.join()
    assert len(found[0]) == 1


def connect(where: tuple[str, int | None]) -> int:
    with socket.socket() as probe:
        return probe.connect_ex(where)


def test_stop_does_not_wait_for_a_body_that_is_still_arriving(
    pipeline: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as later:
        with site(pipeline.run_dir) as api:
            client = later.enter_context(raw(api))
            client.sendall(head_of(9) + b"{")
            eventually(lambda: api.gateway.counters.num_open == 1)
        reply = client.recv(4096)
    assert b" 503 " in reply.splitlines()[0]
    assert b'"draining"' in reply
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_gateway_imports_no_torch_and_the_command_line_no_web_framework() -> None:
    code = (
        "import importlib, sys; importlib.import_module(sys.argv[1]); print(*[n in sys.modules for n in sys.argv[2:]])"
    )
    for module, banned in (
        ("gateway.serving.server", ["torch", "transformers"]),
        ("cli", ["torch", "fastapi", "uvicorn"]),
    ):
        command = [sys.executable, "-c", code, f"triptych.launch.{module}", *banned]
        assert set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()) == {"False"}


def test_full_collections_do_not_visit_what_the_server_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    found: dict[str, bool] = {}

    def run(sockets: list[socket.socket]) -> None:
        found["is collected"] = any(each is made for each in gc.get_objects())
        found["others are"] = gc.isenabled()

    monkeypatch.setattr(
        server, "make_server", lambda *_, **__: SimpleNamespace(run=run, started=True, has_lost_pipeline=False)
    )
    with socket.socket() as listener:
        server.serve(SimpleNamespace(board=SimpleNamespace(close=list)), listener)  # type: ignore[arg-type]
    assert found == {"is collected": False, "others are": True}


def test_gateway_whose_parent_has_ended_holds_the_address_no_longer_than_it_takes_to_see_that() -> None:
    """It ends before it reads its settings, and imports what it needs to serve."""
    command = [sys.executable, "-m", "triptych.launch.gateway", "--supervised", "--parent", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as gateway:
        try:
            assert gateway.wait(60) == 1
        finally:
            gateway.kill()


def test_settings_survive_json(tmp_path: Path) -> None:
    config = GatewayConfig(http=":0", served_model_name=("a", "b"), api_key="k", stream_interval=3)
    settings = Settings(config=config, run_dir=tmp_path, index=1, listen_fd=2, heartbeat_fd=3, log_level="info")
    assert Settings.from_json(settings.to_json()) == settings


@contextmanager
def standing_alone(driver: Driver, path: Path, end: signal.Signals) -> Iterator[httpx2.Client]:
    """A gateway started with its own command, at a Unix socket, until this signal ends it. Its log is beside that."""
    command = [sys.executable, "-m", "triptych.launch.gateway", "--run-dir", str(driver.run_dir)]
    with log_of(path).open("w") as log, subprocess.Popen([*command, "--http", f"unix:{path}"], stderr=log) as gateway:
        try:
            transport = httpx2.HTTPTransport(uds=str(path), retries=0)
            eventually(lambda: is_served(str(path)))
            with httpx2.Client(base_url="http://gateway", transport=transport, timeout=60) as http:
                yield http
            gateway.send_signal(end)
            gateway.wait(60)
            assert not path.exists()
        finally:
            gateway.kill()


def log_of(path: Path) -> Path:
    return path.with_suffix(".log")


def test_gateway_is_also_a_command_and_each_counts_its_own_requests(
    pipeline: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_LOG_LEVL", "debug")
    monkeypatch.setenv("TRIPTYCH_PAGE_SIZE", "32")  # of serve

    def counts() -> list[float]:
        """Requests for the version that each gateway has counted."""
        rows = re.findall(r'triptych_http_requests_total\{.*route="/version".*\} (\S+)', http.get("/metrics").text)
        return sorted(map(float, rows))

    with served(pipeline) as http:
        alone = partial(standing_alone, pipeline)
        with alone(tmp_path / "a", signal.SIGINT) as one, alone(tmp_path / "b", signal.SIGTERM) as two:
            for client, times in ((http, 1), (one, 2), (two, 3)):
                for _ in range(times):
                    assert client.get("/version").status_code == 200
            eventually(lambda: counts() == [1, 2, 3])
            assert two.post(PATH, json={"prompt": "hi", "max_tokens": 2}).status_code == 200
        assert counts() == [1]
    log = log_of(tmp_path / "b").read_text()
    assert log.count("not a flag") == log.count("did you mean TRIPTYCH_LOG_LEVEL?") == 1
