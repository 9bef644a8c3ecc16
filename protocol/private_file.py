"""Files and folders that only their owner can read."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

FOLDER_MODE = 0o700


def remove_if_possible(path: Path) -> None:
    """Remove a file whose name means nothing any more: not worth an error where nothing can be written."""
    with contextlib.suppress(OSError):
        path.unlink()


def write_private(path: Path, content: str | bytes, *, is_durable: bool = False) -> None:
    """Write a file atomically, readable by its owner only. ``is_durable``: it survives a power loss."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        # What was written of it may have filled the disk, and the log could not even say so.
        remove_if_possible(temporary)
        raise
    if is_durable:
        flush_names(path.parent)


def flush_names(folder: Path) -> None:
    """Let the names of files in it survive a power loss, if its file system can be asked for that."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # as by some of networks, and between a virtual machine and its host
            raise
    finally:
        os.close(file)
