"""Drivers of tests share fork servers, unless a worker would inherit something else."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.forking import Shared, shared_servers
from triptych import Driver


@contextmanager
def one_file_less() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def ignored_signal() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGUSR1, before)


@contextmanager
def other_umask() -> Iterator[None]:
    before = os.umask(0o27)
    yield
    os.umask(before)


@contextmanager
def other_variable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", "/nowhere")
        yield


@contextmanager
def other_folder() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("/")
        yield


def test_two_drivers_have_the_same_server() -> None:
    def servers() -> set[int]:
        return {each.pid for each in psutil.Process().children() if "triptych.workers.fork_server" in each.cmdline()}

    with shared_servers():
        before = servers()
        with Driver("hash-lm"), Driver("hash-lm"):
            assert len(servers() - before) == 1


def test_server_that_is_lost_is_replaced(tmp_path: Path) -> None:
    """As one that did not answer on a busy machine: the workers of all later tests were started anew."""
    with ThreadPoolExecutor(1) as starter, (tmp_path / "log").open("w") as log:
        shared = Shared(tmp_path, starter)
        lost = shared.server(needs_torch=False)
        assert lost is not None
        lost.end()
        assert lost.fork(["-"], {}, [log.fileno()]) is None
        other = shared.server(needs_torch=False)
        assert other is not None
        assert other is not lost
        shared.close()


@pytest.mark.parametrize("change", [one_file_less, ignored_signal, other_umask, other_variable, other_folder])
def test_there_is_none_where_a_process_would_inherit_something_else(
    change: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as starter:
        shared = Shared(tmp_path, starter)
        with change():
            assert shared.server(needs_torch=False) is None


def test_change_that_is_left_behind_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="not forked: .*LOCAL_RANK=1"), shared_servers():
        monkeypatch.setenv("LOCAL_RANK", "1")
