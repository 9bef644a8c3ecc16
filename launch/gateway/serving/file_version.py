"""Whether a file is still the one that was read: keys and certificates may be replaced while a gateway runs."""

from __future__ import annotations

from pathlib import Path


def version_of(path: str | None) -> tuple[int, ...]:
    """What a file's replacement, or a write to it, changes. Empty if there is no file: none is configured, or it was
    removed.
    """
    if path is None:
        return ()
    try:
        facts = Path(path).stat()
    except OSError:
        return ()
    return facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_size
