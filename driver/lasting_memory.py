"""Memory of execute that one of its processes leaves to the next one."""

from __future__ import annotations

import contextlib
import os
from contextlib import ExitStack
from pathlib import Path

from ..protocol.descriptors import beyond_standard_streams
from ..protocol.run_dir import kv_path, weights_path
from ..protocol.system_calls import memfd_create
from .deaths import Death


class LastingMemory:
    """A file in memory, without a name of its own: it ends with this process and those that have mapped it.

    Not a file in the run directory, as there may be little room in ``/dev/shm``. The workers find it by a link.
    """

    def __init__(self, link: Path) -> None:
        """
        Raises:
            OSError: no file can be opened, or the link cannot be created.
        """
        self._link = link
        with beyond_standard_streams():
            self._file = memfd_create(f"triptych-{link.name}")
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


class ExecuteMemory:
    """KV pages and packed weights, which the next process of execute finds, if it can trust them."""

    def __init__(self, run_dir: Path) -> None:
        """
        Raises:
            OSError: see ``LastingMemory``.
        """
        with ExitStack() as undo:
            self._kv = undo.enter_context(contextlib.closing(LastingMemory(kv_path(run_dir))))
            self._weights = undo.enter_context(contextlib.closing(LastingMemory(weights_path(run_dir))))
            self._files = undo.pop_all()

    def close(self) -> None:
        self._files.close()

    def note_death(self, death: Death, *, is_degraded: bool) -> None:
        """``is_degraded``: execute has crashed too often to go on as before."""
        if death.role != "execute" or not death.is_internal:
            return
        self._kv.discard()  # what else has it written there?
        if is_degraded:  # it cannot have written to complete weights, but whatever may be wrong is made anew
            self._weights.discard()

    def note_vacancy(self, role: str) -> None:
        """That worker will not be started again."""
        if role == "execute":
            self._kv.discard()
            self._weights.discard()
