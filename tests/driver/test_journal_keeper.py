"""What the driver does with a journal that could not be flushed, has no disk space, or was truncated."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.cards import CARD
from tests.protocol.factories import TIMES, fail_to_sync, make_record
from tests.waiting import eventually
from triptych.driver.deaths import Death
from triptych.driver.journal_keeper import JournalKeeper, warn_of_small_arena
from triptych.driver.run_dir import RunDir
from triptych.protocol.config import PipelineConfig
from triptych.protocol.errors import ConfigError, JournalError
from triptych.protocol.journal.layout import HEADER_BYTES
from triptych.protocol.journal.releases import ReleaseWriter
from triptych.protocol.journal.requests import RequestWriter


def keep(folder: Path, flush: str = "accept", name: str = "journal") -> JournalKeeper:
    service = {"journal": str(folder / name), "journal_flush": flush, "journal_flush_ms": 1.0}
    config = PipelineConfig.from_options(model="hash-lm", max_records=64, arena_bytes=1 << 20, **service)
    return JournalKeeper(folder, config)


def test_next_driver_writes_again_what_a_flush_failed_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = keep(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail_to_sync)
        with pytest.raises(JournalError):
            keeper.journal.flush()
        keeper.close()
        with pytest.raises(JournalError, match="Input/output error"):
            keep(tmp_path)  # the disk is unchanged
    keeper = keep(tmp_path)
    keeper.journal.flush()
    keeper.close()


def test_path_that_cannot_be_looked_up_is_an_error_about_the_journal(tmp_path: Path) -> None:
    """Not about the run directory."""
    with pytest.raises(ConfigError, match=r"the journal .* cannot be created: File name too long") as caught:
        keep(tmp_path, name="x" * 300)
    assert caught.value.param == "journal"


def make_sparse(path: Path) -> None:
    """Replace a file by a copy with holes."""
    content = path.read_bytes()
    path.unlink()
    with path.open("wb") as copy:
        copy.write(content[:HEADER_BYTES])
        copy.truncate(len(content))


def test_holes_of_a_copy_get_their_space_before_a_worker_writes_into_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, on a full disk, a store ends its process without a word."""
    keep(tmp_path).close()
    path = tmp_path / "journal"
    make_sparse(path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(ConfigError, match=r"journal has holes, \d+ bytes cannot be allocated: No space left"):
            keep(tmp_path)
    assert path.stat().st_blocks * 512 < path.stat().st_size
    keep(tmp_path).close()
    assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_driver_does_not_touch_a_journal_that_was_truncated_while_it_was_in_use(tmp_path: Path) -> None:
    """To touch it would end the program that holds the driver."""
    keeper = keep(tmp_path)
    keeper.check_after(Death("execute", -signal.SIGBUS, is_internal=True, out_of_memory=False))
    os.truncate(keeper.path, 0)
    with pytest.raises(JournalError, match="truncated to 0 bytes while it was in use"):
        keeper.check_after(Death("execute", 1, is_internal=True, out_of_memory=False))
    assert (keeper.num_unanswered, keeper.has_unread_ends, keeper.has_failed) == (0, False, True)
    keeper.close()


def test_disk_that_cannot_be_read_is_the_reason_for_a_bus_error_and_keeps_a_driver_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    keeper = keep(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        with pytest.raises(JournalError, match="journal cannot be read: Input/output error"):
            keeper.check_after(Death("execute", -signal.SIGBUS, is_internal=True, out_of_memory=False))
        keeper.check_after(Death("execute", -signal.SIGSEGV, is_internal=True, out_of_memory=False))
        keeper.close()
        with pytest.raises(JournalError, match="journal cannot be read: Input/output error"):
            keep(tmp_path)


@pytest.mark.parametrize(
    ("module", "call", "error", "why"),
    [
        (os, "link", errno.EPERM, "Operation not permitted"),
        (mmap, "mmap", errno.ENODEV, "its file system shares no memory"),  # "No such device" would say nothing
    ],
    ids=["no hard links", "no shared memory"],
)
def test_what_a_file_system_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, call: str, error: int, why: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(module, call, refuse)
    with pytest.raises(ConfigError, match=rf"the journal .* cannot be created: {why}$"):
        keep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_ends_are_unread_until_the_client_acknowledges_them_or_does_not_come(tmp_path: Path) -> None:
    """Until then a stop needs summarize: a complete answer may not have reached its client."""
    keeper, seen = keep(tmp_path), list[bool]()
    requests, releases = RequestWriter(keeper.journal), ReleaseWriter(keeper.journal)
    for forget in (releases.forget, releases.give_up):
        seen.append(keeper.has_unread_ends)
        key = requests.accept(make_record(), TIMES)
        seen.append(keeper.has_unread_ends)
        releases.release(*key, num_tokens=0, reason="length")
        seen.append(keeper.has_unread_ends)
        releases.acknowledge(*key)  # one of several choices
        seen.append(keeper.has_unread_ends)
        forget(*key)
    assert [*seen, keeper.has_unread_ends] == [False, True, True, True] * 2 + [False]
    keeper.close()


def test_log_says_how_many_requests_are_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "triptych.driver"):
        keeper = keep(tmp_path)
        assert caplog.messages == []
        RequestWriter(keeper.journal).accept(make_record(), TIMES)
        keeper.close()
        keep(tmp_path).close()
    assert caplog.messages == [f"{tmp_path / 'journal'}: unanswered requests of an earlier driver: 1"]


@pytest.mark.parametrize(("max_model_len", "num_warnings"), [(1 << 14, 0), ((1 << 14) + 1, 1)])
def test_arena_without_room_for_the_answers_that_may_be_live_is_logged(
    max_model_len: int, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = PipelineConfig.from_options(model="hash-lm", arena_bytes=8 * 8 << 14)  # 8 bytes a token, as for 8 answers
    warn_of_small_arena(config, replace(CARD, max_live=8, max_model_len=max_model_len))
    assert len(caplog.messages) == num_warnings


def test_flushing_thread_ends_at_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "fdatasync", fail_to_sync)
    keeper = keep(tmp_path, "interval")
    thread = keeper._thread
    assert thread is not None
    eventually(lambda: not thread.is_alive())
    keeper.close()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["the journal is no longer flushed"]


def test_children_of_a_killed_driver_keep_neither_its_folder_nor_its_journal_locked(tmp_path: Path) -> None:
    """As those of multiprocessing do, which live on when their parent is killed."""
    until, end = os.pipe()
    begun, begin = os.pipe()
    if (driver := os.fork()) == 0:
        held = RunDir(tmp_path), keep(tmp_path)
        if os.fork() == 0:
            os.write(begin, b"\0")
            os.close(end)
            os.read(until, 1)
            os._exit(len(held))
        os.read(begun, 1)  # killed sooner, it would leave a child that is about to close them
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(driver, 0)[1] == signal.SIGKILL
    run_dir, keeper = RunDir(tmp_path), keep(tmp_path)
    for file in (until, end, begun, begin):
        os.close(file)
    keeper.close()
    run_dir.unlock()
