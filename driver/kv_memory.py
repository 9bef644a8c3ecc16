"""Memory for the KV pages of execute, which a process of execute leaves to the next one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..protocol.descriptors import beyond_standard_streams
from ..protocol.run_dir import kv_path
from ..protocol.system_calls import memfd_create


class KvMemory:
    """A file in memory, without a name of its own: it ends with this process and those that have mapped it.

    Not a file in the run directory, as there may be little room in ``/dev/shm``. The workers find it by a link.
    """

    def __init__(self, run_dir: Path) -> None:
        """
        Raises:
            OSError: no file can be opened, or the link cannot be created.
        """
        self._link = kv_path(run_dir)
        with beyond_standard_streams():
            self._file = memfd_create("triptych-kv")
        try:
            os.fchmod(self._file, 0o600)
            self._link.unlink(missing_ok=True)  # of an earlier driver
            self._link.symlink_to(f"/proc/{os.getpid()}/fd/{self._file}")
        except BaseException:
            os.close(self._file)
            raise

    def discard(self) -> None:
        """Forget what is in it, and give the memory back. No process may have it mapped."""
        os.ftruncate(self._file, 0)

    def close(self) -> None:
        self.discard()  # a program that was forked from this one still has the file
        os.close(self._file)
        with contextlib.suppress(OSError):  # the folder is read-only now
            self._link.unlink(missing_ok=True)
