"""Where this package keeps what it can make again, and how much of it."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def cache_folder() -> Path:
    """
    Raises:
        OSError: there is none: nobody knows the home of this user.
    """
    # The one variable read outside launch: where a user's caches lie is the desktop's convention, not our setting.
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "triptych"
    except RuntimeError as error:
        raise OSError(f"no place for a cache: {error}") from error


def note_use(entry: Path) -> None:
    """It is the newest now. A cache that cannot be written is none the worse."""
    with contextlib.suppress(OSError):
        os.utime(entry)


def keep_newest(folder: Path, pattern: str, count: int) -> None:
    """Of the files or folders that match, those used last stay. Others may do the same at the same time."""
    entries = []
    for entry in folder.glob(pattern):
        with contextlib.suppress(OSError):
            entries.append((entry.stat().st_mtime_ns, entry))
    for _, entry in sorted(entries, reverse=True)[count:]:
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
