"""Where this package caches files that it can recreate, and how many of them it keeps."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

_SCRATCH = "making-"
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}  # some network file systems


def cache_folder() -> Path:
    """Where this user keeps what can be made again.

    Raises:
        OSError: there is no such folder, as this user's home directory is unknown.
    """
    # The one variable read outside launch: where a user's caches are is a desktop convention, not a setting of ours.
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "triptych"
    except RuntimeError as error:
        raise OSError(f"no folder for the cache: {error}") from error


def places(name: str, spare: Path | None) -> list[Path]:
    """The folders of this name: the one in the cache, if there is a cache, then the one in ``spare``, for what the
    cache cannot take. They need not exist yet.
    """
    spares = [] if spare is None else [spare / name]
    try:
        return [cache_folder() / name, *spares]
    except OSError:
        return spares


def note_use(entry: Path) -> None:
    """Marks the entry as the most recently used. If the cache is not writable, nothing happens."""
    with contextlib.suppress(OSError):
        os.utime(entry)


def keep_newest(folder: Path, pattern: str, count: int) -> None:
    """Deletes all but the ``count`` most recently used files or folders that match. Other processes may do so too."""
    entries = []
    for entry in folder.glob(pattern):
        with contextlib.suppress(OSError):
            entries.append((entry.stat().st_mtime_ns, entry))
    for _, entry in sorted(entries, reverse=True)[count:]:
        _remove(entry)


def _remove(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def keep_in_one(entries: Iterable[Path], write: Callable[[Path], object], what: str, *, count: int) -> None:
    """Write a file or a folder to the first of these places that takes it, and keep the ``count`` newest entries there
    with names of that length. What is at the place could not be read, and is replaced. If no place takes it, only the
    next start takes longer.
    """
    for entry in entries:
        try:
            _remove(entry)
            with making(entry) as scratch:
                if scratch is not None:
                    write(new := scratch / entry.name)
                    os.rename(new, entry)  # atomic
            keep_newest(entry.parent, "?" * len(entry.name), count)
        except OSError as error:
            logger.info("cannot keep %s in the cache: %s", what, error)
        else:
            return


@contextlib.contextmanager
def making(target: Path) -> Iterator[Path | None]:
    """A new folder beside ``target``, in which to make it before it is moved into place; None if ``target`` exists.

    A process that needs the same target meanwhile waits, and then finds it; those that make other targets do not wait.
    What killed processes left behind is deleted.

    Raises:
        OSError: nothing can be written there.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for name, scratch in _scratches(target.parent):
        with contextlib.suppress(OSError), _locked(target.with_name(name), waits=False):  # unless someone makes it now
            shutil.rmtree(scratch, ignore_errors=True)
    with _locked(target, waits=True) as is_alone:
        if is_alone:
            for name, scratch in _scratches(target.parent):
                if name == target.name:  # of a process that was killed while this one waited for it
                    shutil.rmtree(scratch, ignore_errors=True)
        if target.exists():
            yield None
            return
        prefix = f"{_SCRATCH}{target.name}-"
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix, ignore_cleanup_errors=True) as folder:
            yield Path(folder)


def _scratches(folder: Path) -> list[tuple[str, Path]]:
    """What is being made there, or was when its process was killed: the name of the target, and the folder."""
    return [(path.name.removeprefix(_SCRATCH).rpartition("-")[0], path) for path in folder.glob(f"{_SCRATCH}*-*")]


@contextlib.contextmanager
def _locked(target: Path, *, waits: bool) -> Iterator[bool]:
    """Yields whether this process is the only one that makes the target. Where files cannot be locked, several may make
    it at the same time: the last one's stays.

    Raises:
        OSError: another process may be making it, and this one does not wait; or no file can be written there.
    """
    file = target.with_name(f"{target.name}.lock")
    while True:
        with file.open("w") as lock:
            is_alone = _take(lock, target, waits=waits)
            if is_alone and not _is_at(file, lock):
                continue  # who had it before has deleted it: there may be a new one, locked by a third process
            try:
                yield is_alone
            finally:
                with contextlib.suppress(OSError):
                    file.unlink()
            return


def _is_at(file: Path, lock: TextIO) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return False


def _take(lock: TextIO, target: Path, *, waits: bool) -> bool:
    """Whether the file is now locked by this process; False if files cannot be locked there.

    Raises:
        OSError: another process has locked it, or files cannot be locked, and this one does not wait.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not waits:
            raise
        logger.info("waiting for another process, which is making %s", target)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS or not waits:
            raise
        logger.warning("%s cannot be locked: processes that start at the same time may make it several times", target)
        return False
    return True
