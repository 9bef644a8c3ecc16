"""A failed start says what helps, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.protocol.factories import accept, make_journal
from tests.waiting import eventually
from triptych import AsyncDriver, Driver
from triptych.driver import driver as driver_module
from triptych.driver import parts
from triptych.driver import run_dir as run_dir_module
from triptych.driver.journal_keeper import num_unanswered
from triptych.driver.run_dir import PREFIX, TEMPORARY_FILE, RunDir
from triptych.driver.supervisor import Supervisor
from triptych.protocol.board import FAILED, ROLES, Board
from triptych.protocol.errors import ConfigError, WorkerDied
from triptych.protocol.journal.layout import Journal
from triptych.protocol.journal.requests import RequestWriter


def pids_of(driver: Driver) -> list[int]:
    """The workers' process ids, once all three exist."""
    by_role = {} if driver._started is None else driver._started.supervisor.pids
    pids = [pid for pid in by_role.values() if pid is not None]
    return pids if len(pids) == 3 else []


def leave_requests(folder: Path) -> None:
    """Leave a run directory as a killed driver leaves it."""
    run_dir = RunDir(folder)
    journal = make_journal(run_dir.path)
    accept(RequestWriter(journal), journal)
    (run_dir.path / TEMPORARY_FILE).touch()
    run_dir.unlock()


def allocate_all_but(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ``nth`` allocation of file space during a start fails."""
    allocate, calls = os.posix_fallocate, list[int]()

    def allocate_or_fail(file: int, offset: int, size: int) -> None:
        calls.append(size)
        if len(calls) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate_or_fail)


@pytest.mark.parametrize(
    ("nth", "text"),
    [
        (1, r"the journal .* needs \d+ bytes.* use a smaller --arena-bytes, or a --run-dir"),
        (2, r"the board .* needs \d+ bytes.*--run-dir"),
    ],
    ids=["journal", "board"],
)
def test_full_disk_error_says_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, text: str) -> None:
    allocate_all_but(nth, monkeypatch)
    monkeypatch.setattr(run_dir_module, "SHARED_MEMORY", tmp_path)
    with pytest.raises(ConfigError, match=text):
        Driver("hash-lm").start()
    assert list(tmp_path.iterdir()) == []


def test_full_disk_of_the_journal_is_not_blamed_on_a_folder_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_requests(tmp_path / f"{PREFIX}kept")
    monkeypatch.setattr(run_dir_module, "SHARED_MEMORY", tmp_path)
    run_dir = RunDir()
    helps = [run_dir.what_helps(OSError(errno.ENOSPC, "full", name)) for name in (str(tmp_path / "a"), "/proc/a")]
    run_dir.remove()
    assert [bool(hint) for hint in helps] == [True, False]
    allocate_all_but(1, monkeypatch)
    with pytest.raises(ConfigError) as error:
        Journal.create(tmp_path / "journal", num_records=1, arena_bytes=64)
    assert isinstance(error.value.__cause__, OSError)
    assert error.value.__cause__.filename == str(tmp_path / "journal")


@pytest.mark.parametrize("nth", [1, 2], ids=["journal", "board"])
def test_full_disk_error_names_what_a_killed_driver_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    kept = tmp_path / f"{PREFIX}kept"
    leave_requests(kept)
    size = sum(path.stat().st_blocks * 512 for path in kept.iterdir())
    monkeypatch.setattr(run_dir_module, "SHARED_MEMORY", tmp_path)
    allocate_all_but(nth, monkeypatch)
    with pytest.raises(ConfigError, match=f"{kept} takes {size} bytes.* --run-dir {kept} resumes them.* remove"):
        Driver("hash-lm").start()
    assert list(tmp_path.iterdir()) == [kept]


def test_full_disk_error_says_that_the_run_directory_holds_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_requests(tmp_path)
    allocate_all_but(2, monkeypatch)  # the board: there is a journal
    with pytest.raises(ConfigError, match=f"{tmp_path} holds requests of an earlier driver, which no driver elsewhere"):
        Driver("hash-lm", run_dir=tmp_path).start()


@pytest.fixture(scope="module")
def _kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory as a driver leaves it that was stopped and told to keep unanswered requests."""
    folder = tmp_path_factory.mktemp("kept")
    folder.chmod(0o700)
    with Driver("hash-lm", run_dir=folder, hash_step_ms=50.0) as driver:
        driver.submit([5, 6, 7], max_tokens=100, request_id="a").accepted(20)
        driver.stop(mode="keep")
    return folder


@pytest.fixture
def kept(_kept: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(_kept, tmp_path / "k")


@pytest.mark.parametrize("name", ["triptych-journal", "triptych-client", "triptych-supervisor", "triptych-control"])
def test_lack_of_threads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    before = our_threads()
    with pytest.raises(ConfigError, match=r"no thread can be started: raise the limit of processes .* or of memory"):
        Driver("hash-lm", journal=str(tmp_path / "journal"), journal_flush="interval").start()
    assert our_threads() == before


def our_threads() -> set[threading.Thread]:
    """Including those of pipelines shared with other tests."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("triptych-")}


def test_cancelled_start_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_ready = Supervisor.wait_ready

    def wait_for_ever(self: Supervisor, deadline: float, *, patience_s: float) -> bool:
        wait_ready(self, deadline, patience_s=patience_s)
        assert time.monotonic() < deadline, "the start was not cancelled"
        return False

    async def body() -> list[int]:
        driver = AsyncDriver("hash-lm", start_timeout_s=5.0)
        starting = asyncio.create_task(driver.start())
        pids = await asyncio.to_thread(eventually, lambda: pids_of(driver.driver))
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    monkeypatch.setattr(run_dir_module, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(Supervisor, "wait_ready", wait_for_ever)
    threads = our_threads()
    assert asyncio.run(body()) == []
    assert our_threads() <= threads
    assert list(tmp_path.iterdir()) == []


def test_cancelling_a_second_start_changes_nothing() -> None:
    async def body() -> None:
        async with AsyncDriver("hash-lm") as driver:
            again = asyncio.create_task(driver.start())
            asyncio.get_running_loop().call_soon(again.cancel)
            with pytest.raises(asyncio.CancelledError):
                await again
            assert (await driver.generate([5, 6, 7], max_tokens=1)).finish_reason == "length"

    asyncio.run(body())


@pytest.mark.parametrize(
    ("name", "raised"), [("note_first_epochs", ConfigError), ("Client", OSError), ("ControlServer", ConfigError)]
)
def test_any_failed_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, raised: type[Exception]
) -> None:
    def fail(*_: object, **__: object) -> None:
        if driver._started is not None:
            pids.extend(eventually(lambda: pids_of(driver)))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_dir_module, "SHARED_MEMORY", tmp_path)
    driver, pids = Driver("hash-lm"), list[int]()
    num_open, threads = len(os.listdir("/proc/self/fd")), our_threads()
    with monkeypatch.context() as patch:
        patch.setattr(driver_module if name == "ControlServer" else parts, name, fail)
        with pytest.raises(raised, match="No space left"):
            driver.start()
    assert len(pids) == (3 if name == "ControlServer" else 0)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert our_threads() <= threads
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert list(tmp_path.iterdir()) == []
    assert driver.stop() == {}


def test_failed_start_ends_no_request_of_the_previous_driver(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another driver can use the folder at once."""

    def fail(*_: object) -> None:
        eventually(lambda: all(driver._started is not None and driver._started.board.ready(role) for role in ROLES))
        raise OSError(errno.ENOSPC, "No space left on device")

    driver = Driver("hash-lm", run_dir=kept, hash_step_ms=50.0)
    with monkeypatch.context() as patch:
        patch.setattr(driver_module, "ControlServer", fail)
        with pytest.raises(ConfigError):
            driver.start()
    assert num_unanswered(Journal.open(kept / "journal")) == 1
    RunDir(kept).unlock()


def test_interrupted_start_ends_no_request_of_the_previous_driver(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """summarize, which ends requests at a stop, is ready long before a model is loaded."""
    wait_ready = Supervisor.wait_ready

    def never_ready(self: Supervisor, deadline: float, *, patience_s: float) -> bool:
        wait_ready(self, deadline, patience_s=patience_s)
        return False

    def interrupt(driver: Driver) -> None:
        if driver.phases["summarize"][0] == "ready":
            raise KeyboardInterrupt

    monkeypatch.setattr(Supervisor, "wait_ready", never_ready)
    with pytest.raises(KeyboardInterrupt):
        Driver("hash-lm", run_dir=kept, hash_step_ms=50.0).start(progress=interrupt)
    assert num_unanswered(Journal.open(kept / "journal")) == 1


def test_worker_that_fails_to_start_ends_no_request_of_the_previous_driver(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the other workers survive it: here until summarize would have ended the request."""
    start_process, set_mode, journal = Supervisor._start_process, Board.set_mode, Journal.open(kept / "journal")

    def start_wrongly(supervisor: Supervisor, role: str, *, arguments: list[str], **options: Any) -> Any:
        if role == "execute":
            if not supervisor._board.ready("summarize"):
                raise BlockingIOError(errno.EAGAIN, "no process left")
            arguments = [*arguments, "--wrong"]
        return start_process(supervisor, role, arguments=arguments, **options)

    def set_mode_and_wait(board: Board, mode: int) -> None:
        set_mode(board, mode)
        if mode == FAILED:
            with suppress(AssertionError):
                eventually(lambda: num_unanswered(journal) == 0, timeout=1)

    monkeypatch.setattr(Supervisor, "_start_process", start_wrongly)
    monkeypatch.setattr(Board, "set_mode", set_mode_and_wait)
    with pytest.raises(WorkerDied, match="--wrong"):
        Driver("hash-lm", run_dir=kept, hash_step_ms=50.0, max_restarts=1000).start()
    assert num_unanswered(journal) == 1


def test_cancelled_start_ends_no_request_of_the_previous_driver(kept: Path) -> None:

    async def body() -> None:
        driver = AsyncDriver("hash-lm", run_dir=kept, hash_step_ms=50.0)
        start = driver.driver.start

        def start_and_wait(**_: object) -> None:
            start()
            asyncio.run_coroutine_threadsafe(cancel(), loop).result()

        async def cancel() -> None:
            starting.cancel()

        loop = asyncio.get_running_loop()
        driver.driver.start = start_and_wait  # type: ignore[assignment]
        starting = asyncio.create_task(driver.start())
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(body())
    assert num_unanswered(Journal.open(kept / "journal")) == 1


@pytest.mark.parametrize("length", [92, 100])
def test_run_directory_whose_socket_paths_would_be_too_long_is_refused(tmp_path: Path, length: int) -> None:
    """Even if some of them would fit."""
    folder = tmp_path / ("p" * (length - len(str(tmp_path)) - 1))
    with pytest.raises(ConfigError, match=f"summarize.inbox has {length + 16} bytes, the limit is 107"):
        Driver("hash-lm", run_dir=folder).start()
    RunDir(folder).unlock()
    assert os.listdir(folder) == ["lock"]


def test_run_directory_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    """ZeroMQ takes UTF-8 only, and a name in another encoding ended the start with a traceback."""
    with pytest.raises(ConfigError, match=r"udcff/summarize.inbox' is not UTF-8: choose another --run-dir"):
        Driver("hash-lm", run_dir=os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).start()
