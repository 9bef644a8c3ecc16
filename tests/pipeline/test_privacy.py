"""What a pipeline must not do: connect to other machines, or log prompts and texts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.pipeline.conftest import hash_driver
from triptych import Driver
from triptych.protocol.errors import RequestError

MARKER = "xyzzy-plugh-4711"
WATCH = """
import os, sys
def watch(event, arguments):
    if event in ("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request"):
        with open(os.environ["WATCH_FILE"], "a") as file:
            file.write(f"{sys.argv} {event} {arguments}\\n")
sys.addaudithook(watch)
with open(os.environ["WATCH_FILE"] + ".lives", "a") as file:
    file.write("x")
"""


def everything(driver: Driver) -> Iterator[Any]:
    """Requests of every kind, with a marker wherever a request can contain text."""
    yield driver.generate(MARKER, max_tokens=4)
    yield driver.generate(messages=[{"role": "user", "content": MARKER}], max_tokens=4)
    yield driver.generate(MARKER * 2000, max_tokens=4, truncation="left")
    for bad in (
        {"prompt": MARKER, "stop": MARKER * 40},
        {"prompt": MARKER, MARKER: 1},
        {"prompt": MARKER * 2000},
        {"messages": [{"role": MARKER, "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": MARKER, "text": MARKER}]}]},
        {"prompt": MARKER, "truncation": MARKER},
        {"prompt": MARKER, "logit_bias": {MARKER: 1.0}},
    ):
        with pytest.raises(RequestError):
            driver.generate(**bad)
        yield None


def test_logs_contain_no_prompts(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    assert len(list(everything(driver))) == 10
    driver.restart("prepare")
    driver.generate(MARKER, max_tokens=4)
    logs = {path.name: path.read_text() for path in driver.run_dir.glob("*.log")}
    assert set(logs) == {"prepare.log", "execute.log", "summarize.log"}
    assert [name for name, text in logs.items() if MARKER in text] == []
    assert not any(MARKER in record.getMessage() for record in caplog.records)


def test_no_worker_opens_a_network_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("WATCH_FILE", str(tmp_path / "seen"))
    with hash_driver() as driver:
        list(everything(driver))
        pids = [pid for pid in driver.pids.values() if pid is not None]
        connections = [c for pid in pids for c in psutil.Process(pid).net_connections("inet")]
    assert (tmp_path / "seen.lives").read_text().startswith("xxx")  # more, if one had to be replaced meanwhile
    assert not (tmp_path / "seen").exists(), (tmp_path / "seen").read_text()
    assert connections == []
