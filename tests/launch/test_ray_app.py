"""Two replicas under Ray Serve. The cluster is this machine, and ends with the test."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.ports import free_port
from tests.waiting import eventually
from triptych.protocol.errors import ConfigError

ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'triptych[ray]')")
ray_app: Any = pytest.importorskip("triptych.launch.ray_app")
pytestmark = [pytest.mark.timeout(280), pytest.mark.slow]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of an application with two replicas of the hash model."""
    from ray import serve

    port = free_port()
    os.environ["PYTHONPATH"] = f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        options = {"model": "hash-lm", "min_replicas": "2", "max_replicas": "2", "num_cpus": "0.5", "router": "session"}
        serve.run(ray_app.app(options), name="triptych", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
    assert drivers() == {}


def drivers() -> dict[int, list[psutil.Process]]:
    """Workers of pipelines below this process, by their driver's process."""
    found: dict[int, list[psutil.Process]] = {}
    for child in psutil.process_iter(["cmdline", "ppid"]):
        command = child.info["cmdline"] or []
        if any(argument.startswith("triptych.workers.") for argument in command) and is_of_ray(child.info["ppid"]):
            found.setdefault(child.info["ppid"], []).append(child)
    return found


def is_of_ray(pid: int) -> bool:
    try:
        return str(psutil.Process(pid).name()).startswith("ray::")
    except psutil.NoSuchProcess:
        return False


def ask(url: str, session: str) -> httpx2.Response:
    body = {"model": "hash-lm", "prompt": "one of " + session * 20, "max_tokens": 4, "temperature": 0}
    headers = {"x-session-id": session}
    return httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)


def test_two_replicas_answer_and_a_session_stays_on_its_replica(url: str) -> None:
    assert len(drivers()) == 2
    for session in ("first", "second", "third"):
        replies = [ask(url, session) for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200] * 3, replies[0].text
        cached = [reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
        assert cached[0] == 0
        assert min(cached[1:]) > 0


def test_answer_is_streamed(url: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "hash-lm", "messages": messages, "max_tokens": 3, "stream": True}
    with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_replica_whose_actor_dies_is_replaced(url: str) -> None:
    victim, workers = next(iter(drivers().items()))
    arguments = workers[0].cmdline()
    os.kill(victim, signal.SIGKILL)
    assert eventually(lambda: len(drivers()) == 2 and victim not in drivers(), timeout=120)
    assert eventually(lambda: all(ask(url, session).status_code == 200 for session in "abcd"), timeout=60)
    shutil.rmtree(arguments[arguments.index("--run-dir") + 1])  # left by a driver that was killed


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas is 3, the limits are 1 and 2"),
        ({"router": "nearest"}, "router is 'nearest', known are: load, session"),
        ({"page_sise": 3}, "unknown option 'page_sise'"),
        (
            {"model": "hash-lm", "lora_modules": ["hash-lm=x"]},
            "lora_modules has an adapter 'hash-lm', which is the mod",
        ),
    ],
)
def test_impossible_option_is_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ray_app.app(options)
