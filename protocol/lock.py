"""Locks that end with the process that took them, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import ClassVar

from .descriptors import beyond_standard_streams


class LockFile:
    """An open file or folder for ``flock``. Forked children do not keep it.

    A child inherits the open file, and with it the lock: one that outlives its killed parent, as those of
    multiprocessing do, would keep the next driver out. So it closes the file at once.
    """

    _open: ClassVar[set[LockFile]] = set()  # all of this process: a fork needs to know them

    @beyond_standard_streams()
    def __init__(self, path: Path, flags: int) -> None:
        """Open the file, which only its owner can read if ``flags`` create it; it is not locked yet.

        Raises:
            OSError: it cannot be opened.
        """
        access = os.O_RDONLY if flags & os.O_DIRECTORY else os.O_RDWR
        self._file = os.open(path, access | os.O_CLOEXEC | flags, 0o600)
        self._open.add(self)

    def fileno(self) -> int:
        return self._file

    def take(self) -> bool:
        """Whether it is locked now; False if another process or object holds the lock."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Unlock and close the file; a second call has no effect."""
        if self._file >= 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # explicit: a child forked by other means may have it open
            self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._open.discard(self)

    @classmethod
    def _close_all(cls) -> None:
        for lock in list(cls._open):
            lock._close()


# Once, not for each lock: what is registered cannot be removed.
os.register_at_fork(after_in_child=LockFile._close_all)
