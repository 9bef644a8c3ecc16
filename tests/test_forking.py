"""A forked worker differs from one that was started in nothing but its command."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest

from tests import fork_server
from tests.forking import Forks, forked_workers
from triptych import Driver
from triptych.driver.processes import log_of


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


def test_it_is_a_child_of_this_process_with_the_folder_and_the_files_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with forked_workers(), Driver("hash-lm") as driver:
        worker = psutil.Process(driver.pids["summarize"])
        assert fork_server.__name__ in worker.cmdline()
        assert worker.ppid() == os.getpid()
        assert os.getsid(worker.pid) == worker.pid
        assert worker.cwd() == str(tmp_path)
        assert os.path.samefile(f"/proc/{worker.pid}/fd/2", log_of(Path(driver.run_dir), "summarize"))


@pytest.mark.parametrize("change", [one_file_less, ignored_signal, other_umask, other_variable])
def test_there_is_none_where_a_process_would_inherit_something_else(
    change: Callable[[], AbstractContextManager[None]],
) -> None:
    forks, command = Forks(dict(os.environ)), [sys.executable, "-c", "", "--run-dir", ""]
    with change(), forks.popen(command, env=dict(os.environ)) as process:
        assert type(process) is subprocess.Popen


def test_change_that_is_left_behind_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="not forked: .*LOCAL_RANK=1"), forked_workers():
        monkeypatch.setenv("LOCAL_RANK", "1")
