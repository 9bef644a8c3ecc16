"""The run directory is private, locked, and removed with its driver."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.protocol.factories import accept, make_journal
from triptych import Driver
from triptych.driver import preparing
from triptych.driver import run_dir as module
from triptych.driver.run_dir import RunDir
from triptych.protocol.board import ROLES
from triptych.protocol.errors import ConfigError
from triptych.protocol.journal.requests import RequestWriter
from triptych.protocol.lock import LockFile

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys
from pathlib import Path
from triptych.driver.run_dir import RunDir
held = RunDir(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary() -> Iterator[RunDir]:
    run_dir = RunDir()
    yield run_dir
    run_dir.remove()


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(module, "SHARED_MEMORY", folder)
    return folder


def test_temporary_folder_is_private(temporary: RunDir) -> None:
    assert temporary.is_temporary
    assert temporary.path.stat().st_mode & 0o777 == 0o700


def test_cleaners_of_old_files_are_kept_out(tmp_path: Path) -> None:
    """systemd-tmpfiles skips folders that are locked, with all they hold. Without its files no worker can restart."""
    folder, cleaner = RunDir(tmp_path / "run"), LockFile(tmp_path / "run", os.O_DIRECTORY)
    assert not cleaner.take()
    folder.unlock()
    assert cleaner.take()
    cleaner.release()


def test_temporary_folder_is_removed_with_its_contents(temporary: RunDir) -> None:
    (temporary.path / "sub").mkdir()
    (temporary.path / "sub" / "file").write_text("x")
    temporary.remove()
    assert not temporary.path.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=repr)
def test_temporary_folder_that_cannot_be_locked_is_removed(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bool:
        raise error

    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(LockFile, "take", fail)
    with pytest.raises((KeyboardInterrupt, ConfigError)):
        RunDir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_removed", range(6))
def test_folder_whose_removal_was_interrupted_is_removed_by_the_next_driver(
    num_removed: int, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any number of its files, the lock and the marker included."""
    left, unlink = [None] * num_removed, os.unlink

    def interrupt(*arguments: Any, **options: Any) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        unlink(*arguments, **options)

    first = RunDir()
    (first.path / "execute.rehearse").mkdir()
    for name in ("a", "execute.rehearse/b", "journal", "z"):
        (first.path / name).touch()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patch.setattr(os, "unlink", interrupt)
        first.remove()
    RunDir().remove()
    assert list(shared_memory.iterdir()) == []


def test_without_shared_memory_another_temporary_directory_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_dir = RunDir()
    run_dir.unlock()
    assert run_dir.path.parent == tmp_path


def test_leftovers_of_a_killed_driver_are_removed_by_the_next_one(shared_memory: Path) -> None:
    killed = RunDir()
    (killed.path / "journal").write_bytes(bytes(1000))
    killed.unlock()
    living, last = RunDir(), RunDir()
    assert {path.name for path in shared_memory.iterdir()} == {living.path.name, last.path.name}
    living.unlock()
    last.unlock()


def test_latest_folder_with_requests_is_not_removed(shared_memory: Path) -> None:
    """Three killed drivers left folders: one of them is younger but holds no requests, so it is not the one to keep."""
    left = []
    for number in range(3):
        run_dir = RunDir(shared_memory / f"{module.PREFIX}{number}")
        journal = make_journal(run_dir.path)
        if number < 2:
            accept(RequestWriter(journal), journal)
        (run_dir.path / module.TEMPORARY_FILE).touch()
        os.utime(run_dir.path, (number, number))
        run_dir.unlock()
        left.append(run_dir.path)
    module.sweep(shared_memory)
    assert list(shared_memory.iterdir()) == [left[1]]


def test_explicitly_named_folder_is_never_removed(shared_memory: Path) -> None:
    """Neither one that looks as if Triptych had made it, nor a temporary one that somebody reused."""
    chosen, adopted = RunDir(shared_memory / "triptych-mine"), RunDir()
    chosen.unlock()
    adopted.unlock()
    RunDir(adopted.path).unlock()
    RunDir().unlock()
    assert chosen.path.exists()
    assert adopted.path.exists()


def test_foreign_files_are_not_removed(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = RunDir()
    killed.unlock()
    (shared_memory / "triptych-file").write_text("x")
    (shared_memory / "triptych-link").symlink_to(killed.path)
    (shared_memory / "triptych-empty").mkdir()
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    module.sweep(shared_memory)
    assert len(list(shared_memory.iterdir())) == 4


@pytest.mark.parametrize("name", ["file", "file/below", "closed/below"])
def test_folder_that_cannot_be_created_is_an_error_with_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "closed").mkdir(mode=0)
    if os.getuid() == 0 and name.startswith("closed"):
        pytest.skip("nothing is closed to root")
    with pytest.raises(ConfigError, match=name) as caught:
        RunDir(tmp_path / name)
    assert caught.value.param == "run_dir"


def test_missing_temporary_directory_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    with pytest.raises(ConfigError, match="cannot be used: No usable temporary directory") as caught:
        RunDir()
    assert caught.value.param == "run_dir"


def test_given_folder_is_made_private(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "a" / "b")
    run_dir.unlock()
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    assert not run_dir.is_temporary


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o710])
def test_folder_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=f"has mode {mode:o}, it must be 700") as caught:
        RunDir(tmp_path)
    assert caught.value.param == "run_dir"


def test_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(ConfigError, match=f"belongs to user {other - 1}, not to {other}"):
        RunDir(tmp_path)


def test_second_driver_is_refused(tmp_path: Path) -> None:
    first = RunDir(tmp_path)
    with pytest.raises(ConfigError, match="another driver runs in"):
        RunDir(tmp_path)
    first.unlock()


def test_refused_driver_keeps_nothing_open(tmp_path: Path) -> None:
    first = RunDir(tmp_path)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError):
        RunDir(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == num_open
    first.unlock()


def test_released_folder_can_be_taken(tmp_path: Path) -> None:
    RunDir(tmp_path).unlock()
    RunDir(tmp_path).unlock()


def test_lock_is_released_when_its_process_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="another driver runs in"):
            RunDir(tmp_path)
        holder.kill()
    RunDir(tmp_path).unlock()


def test_folder_that_was_deleted_is_left_and_unlocked(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    shutil.rmtree(run_dir.path)
    run_dir.leave()
    assert not run_dir.path.exists()


def test_run_directory_that_cannot_be_written_is_an_error_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(preparing, "write_private", fail)
    with pytest.raises(ConfigError, match=f"run directory {tmp_path} cannot be written: No space") as caught:
        Driver("hash-lm", run_dir=tmp_path).start()
    assert caught.value.param == "run_dir"


def test_run_directory_that_has_become_read_only_does_not_keep_a_driver_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an error of its disk."""

    def refuse(path: Any, **_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    driver = Driver("hash-lm", run_dir=tmp_path / "run").start(wait=False)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        patch.setattr(os, "unlink", refuse)
        assert set(driver.stop()) <= set(ROLES)
    RunDir(tmp_path / "run").unlock()
