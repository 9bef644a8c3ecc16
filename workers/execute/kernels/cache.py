"""Where this package caches files that it can recreate, and how many of them it keeps."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def cache_folder() -> Path:
    """
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
    """The folders of this name: that of the cache, then the one in ``spare``, for what the cache cannot take. None of
    them may exist yet, and there may be no cache.
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
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
