"""docs/scaling.md: replicas behind sglang-router, which only knows our API."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest

from tests.launch.test_processes import process
from tests.ports import free_port
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
PROGRAM = shutil.which("smg")
PREFIX = "Both questions begin with these words, which are many, so that whoever answered the first has them in pages. "

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(PROGRAM is None, reason="sglang-router is not installed (pip install sglang-router==0.3.2)"),
]


class Fleet(NamedTuple):
    router: httpx2.Client
    replicas: list[httpx2.Client]
    servers: list[subprocess.Popen[str]]


def router_command(urls: list[str], port: int) -> list[str]:
    """The command of the page, with this test's addresses."""
    [line] = re.findall(r"^(smg launch .*)$", (ROOT / "docs" / "scaling.md").read_text(), re.MULTILINE)
    flags = line.partition("--host")[2].split()[1:]
    flags[flags.index("--port") + 1] = str(port)
    flags[flags.index("--prometheus-port") + 1] = str(free_port())
    return [PROGRAM or "", "launch", "--worker-urls", *urls, "--host", "127.0.0.1", *flags]


def is_ready(client: httpx2.Client, path: str = "/ready") -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Two replicas of the hash model and a router in front of them."""
    with ExitStack() as stack:
        run_dirs = [tmp_path / name for name in ("first", "second")]
        hash_model = ("--model", "hash-lm", "--http", "127.0.0.1:0", "--run-dir")
        servers = [stack.enter_context(process("serve", *hash_model, str(folder))) for folder in run_dirs]
        files = [folder / "http_url" for folder in run_dirs]
        eventually(lambda: all(file.exists() and file.read_text() for file in files), timeout=60)
        urls = [file.read_text() for file in files]
        port = free_port()
        clients = [
            stack.enter_context(httpx2.Client(base_url=url, timeout=60, trust_env=False))
            for url in (*urls, f"http://127.0.0.1:{port}")
        ]
        assert eventually(lambda: all(is_ready(client) for client in clients[:2]), timeout=60)
        router = stack.enter_context(subprocess.Popen(router_command(urls, port), stdout=subprocess.DEVNULL))
        stack.callback(router.kill)
        assert eventually(lambda: num_workers(clients[2]) == 2, timeout=60)
        yield Fleet(clients[2], clients[:2], servers)


def num_workers(router: httpx2.Client) -> int:
    """Replicas that the router considers healthy."""
    if not is_ready(router, "/v1/models"):
        return 0
    return sum(worker["is_healthy"] for worker in router.get("/workers").json()["workers"])


def num_answered(replica: httpx2.Client) -> int:
    found = re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", replica.get("/metrics").text, re.MULTILINE)
    return int(sum(map(float, found)))


def ask(fleet: Fleet, question: str) -> httpx2.Response:
    body = {"model": "hash-lm", "prompt": PREFIX + question, "max_tokens": 4, "temperature": 0}
    return fleet.router.post("/v1/completions", json=body)


def test_prefix_is_routed_to_the_replica_that_has_its_pages(fleet: Fleet) -> None:
    replies = [ask(fleet, question) for question in "abcd"]
    assert [reply.status_code for reply in replies] == [200] * 4
    eventually(lambda: sum(map(num_answered, fleet.replicas)) == 4)
    assert sorted(map(num_answered, fleet.replicas)) == [0, 4]
    assert replies[-1].json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_other_replica_answers_when_one_dies(fleet: Fleet) -> None:
    before = ask(fleet, "who?")
    index = int(eventually(lambda: sum(map(num_answered, fleet.replicas))) and num_answered(fleet.replicas[1]))
    fleet.servers[index].send_signal(signal.SIGKILL)
    fleet.servers[index].wait(60)
    after = ask(fleet, "who?")
    assert (after.status_code, before.status_code) == (200, 200), after.text
    assert after.json()["choices"][0]["text"] == before.json()["choices"][0]["text"]
    assert eventually(lambda: num_workers(fleet.router) == 1, timeout=60)


def test_answer_is_streamed_through_the_router(fleet: Fleet) -> None:
    messages = [{"role": "user", "content": PREFIX}]
    body = {"model": "hash-lm", "messages": messages, "max_tokens": 3, "stream": True}
    with fleet.router.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert reply.status_code == 200
    assert lines[-1] == "data: [DONE]"
