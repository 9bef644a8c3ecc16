"""The private folder of one pipeline: its driver makes, locks and removes it. The lock admits one driver at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from ..protocol.errors import ConfigError, JournalError
from ..protocol.home import from_home
from ..protocol.journal.layout import Journal
from ..protocol.lock import LockFile
from ..protocol.private_file import FOLDER_MODE
from ..protocol.run_dir import JOURNAL_FILE

SHARED_MEMORY = Path("/dev/shm")
LOCK_FILE = "lock"
TEMPORARY_FILE = "temporary"  # marks a folder that a driver created for itself
PREFIX = "triptych-"  # of such folders' names

logger = logging.getLogger(__name__)


class RunDir:
    """A locked run directory. The lock is released when its process ends, however it ends."""

    def __init__(self, path: Path | None = None) -> None:
        """
        Raises:
            ConfigError: the folder cannot be created, belongs to another user, is accessible to others, or is in use
                by another driver.
        """
        self.is_temporary = path is None
        self._kept: Path | None = None  # a sibling folder left by a killed driver, kept for its requests
        self._folder: LockFile | None = None  # the folder itself, locked
        try:
            self.path = self._make_temporary() if path is None else from_home(path, param="run_dir").absolute()
            if not self.is_temporary:
                _make(self.path)
            try:
                self._lock = LockFile(self.path / LOCK_FILE, os.O_CREAT)
                self._take()
            except BaseException:
                if self.is_temporary:  # its marker, which would let later drivers remove it, may be missing
                    _remove(self.path)
                raise
        except OSError as error:
            # The result of an earlier ``gettempdir``, if any: calling it here might raise again.
            where = path or f"in {_root() or tempfile.tempdir or 'a temporary directory'}"
            text = f"the run directory {where} cannot be used: {error.strerror}{self.what_helps(error)}"
            raise ConfigError(text, param="run_dir") from error

    def _make_temporary(self) -> Path:
        root = _root()
        self._kept = sweep(root or Path(tempfile.gettempdir()))
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))

    def _take(self) -> None:
        """Lock the folder. A self-created one is marked, so that it can be removed if its driver is killed."""
        try:
            if not self._lock.take():
                advice = "--run-dir names another folder, --connect makes a client of what runs there"
                raise ConfigError(f"another driver runs in {self.path}: {advice}", param="run_dir")
            if self.is_temporary:
                (self.path / TEMPORARY_FILE).touch(0o600)
            else:
                (self.path / TEMPORARY_FILE).unlink(missing_ok=True)
            self._folder = LockFile(self.path, os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # no such locks on this file system, but also no cleaner that heeds them
                # systemd-tmpfiles deletes what was not touched for ten days in /tmp, but nothing in a locked folder.
                self._folder.take()
        except BaseException:
            self.unlock()
            raise

    def what_helps(self, error: BaseException | None) -> str:
        """A hint for the message of ``error``, if the disk is full: which requests to think of before another folder is
        chosen, or which leftover folder takes up the space.
        """
        if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
            return ""
        if not self.is_temporary and _holds_requests(self.path / JOURNAL_FILE):
            return f"; {self.path} holds requests of an earlier driver, which no driver elsewhere answers"
        if self._kept is None:
            return ""
        full = self._kept if error.filename is None else Path(error.filename).parent
        if full.stat().st_dev != self._kept.stat().st_dev:
            return ""
        num_bytes = sum(path.lstat().st_blocks for path in self._kept.rglob("*")) * 512
        return (
            f"; {self._kept} takes {num_bytes} bytes: it holds requests of a driver that was killed;"
            f" --run-dir {self._kept} resumes them, or remove it if they are no longer needed"
        )

    def leave(self) -> None:
        """Give the folder up at a stop: delete it, unless its user has named it."""
        if self.is_temporary:
            self.remove()
            return
        # ZeroMQ leaves socket files behind. Nothing listens on them: the lock is ours and the workers have exited.
        with contextlib.suppress(OSError):  # someone has deleted the folder, or it is read-only now
            for path in self.path.iterdir():
                if path.is_socket():
                    path.unlink(missing_ok=True)
        self.unlock()

    def remove(self) -> None:
        """Delete the folder and release the lock; if a signal interrupts this, the next driver removes the rest."""
        try:
            _remove(self.path)
        finally:
            self.unlock()

    def unlock(self) -> None:
        """Let another driver use the folder."""
        if self._folder is not None:
            self._folder.release()
        self._lock.release()


def sweep(root: Path) -> Path | None:
    """Remove the temporary folders of killed drivers in ``root``; returns the one that was kept, if any.

    The newest one that holds requests is kept: someone may want to resume them. Keeping more would fill the memory of a
    service that is killed and restarted again and again.

    NOTE: the marker is created while the lock is held, so a folder with a marker and without a lock has no driver, and
    gets one only if a driver is told explicitly to use it.
    """
    left: list[tuple[int, Path]] = []
    for path in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            facts = path.lstat()
            if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and (path / TEMPORARY_FILE).exists():
                left.append((facts.st_mtime_ns, path))
    kept: Path | None = None
    for _, path in sorted(left, reverse=True):
        with contextlib.suppress(OSError):
            if _remove_if_left(path, keeps_requests=kept is None):
                kept = path
    return kept


def _remove_if_left(path: Path, *, keeps_requests: bool) -> bool:
    """Remove the folder unless a driver holds it. True if it was kept for its requests."""
    lock = LockFile(path / LOCK_FILE, os.O_NOFOLLOW | os.O_CREAT)  # missing if a removal was interrupted
    try:
        if not lock.take() or not (path / TEMPORARY_FILE).exists():
            return False
        if keeps_requests and _holds_requests(path / JOURNAL_FILE):
            return True
        logger.info("removing %s, left by a driver that was killed", path)
        _remove(path)
        return False
    finally:
        lock.release()


def _remove(folder: Path) -> None:
    """Delete a temporary folder, at last its lock and then its marker: if this is interrupted, the next driver deletes
    the rest.
    """
    last = (LOCK_FILE, TEMPORARY_FILE)
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: last.index(entry.name) if entry.name in last else -1):
            with contextlib.suppress(OSError):
                remove = shutil.rmtree if entry.is_dir(follow_symlinks=False) else os.unlink
                remove(entry)
    shutil.rmtree(folder, ignore_errors=True)  # whatever came meanwhile


def _holds_requests(path: Path) -> bool:
    """Whether a journal has requests that are unanswered or whose answers were not acknowledged."""
    try:
        return bool(Journal.open(path).slots_in_use().size)
    except (JournalError, OSError):
        return False


def has_driver(path: Path) -> bool:
    """Whether a process holds the lock (True if that cannot be determined). Call it only when the service does not
    respond: a driver that starts at this very moment would be refused.
    """
    try:
        with (path / LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # most likely BlockingIOError
        return True
    return False


def _root() -> Path | None:
    # Shared memory: the journal must outlive every process, and should not cost disk writes.
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else None


def _make(path: Path) -> None:
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    facts = path.stat()
    if facts.st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to user {facts.st_uid}, not to {os.getuid()}", param="run_dir")
    if facts.st_mode & 0o077:
        raise ConfigError(f"{path} has mode {facts.st_mode & 0o777:o}, it must be {FOLDER_MODE:o}", param="run_dir")
