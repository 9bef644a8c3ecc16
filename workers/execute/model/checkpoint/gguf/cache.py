"""Where the unpacked copies of GGUF files are, and how they come there: whole or not at all.

Imports neither torch nor gguf: after the first start of a file, this is all that is needed of this folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ......protocol.errors import ConfigError
from ....user_cache import cache_folder, keep_newest, making, note_use
from ..sample import sample_of

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
_VERSION = 2  # of what is made of a file; increase it when the result changes
_NUM_KEPT = 8  # unpacked files in the cache
_KEY_SIZE = 16
_SOURCE = "source.json"  # which file a directory was made of
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def is_gguf(model: str | Path) -> bool:
    return str(model).lower().endswith(SUFFIX)


def find_unpacked(file: Path, *, dtype: str, progress: Callable[[int, int], None]) -> Path:
    """Return the checkpoint directory made of a GGUF file, which is made now if no earlier start has.

    Its weights are of type ``dtype``, bfloat16 for "auto". ``progress`` is called with (done, total) tensors.

    Raises:
        ConfigError: the file is missing, damaged or of a kind that is not supported, or there is no room for it.
    """
    parts = [part.resolve() for part in find_parts(file)]
    stored_dtype = "bfloat16" if dtype == "auto" else dtype
    try:
        source = [_identity(part) for part in parts]
        target = cache_folder() / "gguf" / f"{parts[0].stem[:64]}-{_key(source, stored_dtype)}"
        if not target.is_dir():
            if find_spec("gguf") is None:
                raise ConfigError(f"{file} needs the package gguf: pip install 'triptych[gguf]'", param="model")
            with making(target) as scratch:
                if scratch is not None:
                    _unpack(parts, source, target, scratch, dtype=stored_dtype, progress=progress)
    except OSError as error:
        raise ConfigError(f"{file} cannot be unpacked: {error}", param="model") from error
    note_use(target)
    return target


def find_parts(file: Path) -> list[Path]:
    """List the files that a model consists of, given the only one or the first of them.

    Raises:
        ConfigError: one is missing, or ``file`` is another than the first.
    """
    parts, split = [file], _PART.fullmatch(file.name)
    if split is not None:
        stem, count = split["stem"], split["count"]
        names = [f"{stem}-{number:05}-of-{count}{file.suffix}" for number in range(1, int(count) + 1)]
        if int(split["number"]) != 1:
            raise ConfigError(f"{file} is one of {int(count)} parts: name the first, {names[0]}", param="model")
        parts = [file.with_name(name) for name in names]
    for part in parts:
        if not part.is_file():
            what = "is a part that is missing" if split is not None else "does not exist"
            raise ConfigError(f"GGUF file {part} {what}", param="model")
    return parts


def _identity(file: Path) -> dict[str, Any]:
    stat = file.stat()
    return {"path": str(file), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sample": sample_of(file)}


def _key(source: list[dict[str, Any]], dtype: str) -> str:
    """A hash of what the directory depends on; of a file, that is its path, size and time, and some of its content."""
    identity = json.dumps([_VERSION, version("transformers"), dtype, source])
    return hashlib.sha256(identity.encode()).hexdigest()[:_KEY_SIZE]


def _unpack(
    parts: list[Path],
    source: list[dict[str, Any]],
    target: Path,
    scratch: Path,
    *,
    dtype: str,
    progress: Callable[[int, int], None],
) -> None:
    """Make ``target`` in the folder ``scratch``, which no other process uses."""
    _forget_earlier(source, target.parent)
    from .unpack import unpack

    logger.info("unpacking %s to %s, once", parts[0], target)
    start = time.monotonic()
    new = scratch / "new"
    new.mkdir()
    unpack(parts, new, dtype=dtype, progress=progress)
    if [_identity(part) for part in parts] != source:
        raise ConfigError(f"{parts[0]} was changed while it was unpacked", param="model")
    (new / _SOURCE).write_text(json.dumps(source))
    for made in new.iterdir():
        _write_out(made)  # otherwise the name could outlive a power cut, and the content not
    os.rename(new, target)  # atomic
    keep_newest(target.parent, f"*-{'?' * _KEY_SIZE}", _NUM_KEPT)
    logger.info("unpacked %s in %.1f s", parts[0].name, time.monotonic() - start)


def _forget_earlier(source: list[dict[str, Any]], folder: Path) -> None:
    """Delete what was made of these files when they had another content: it cannot be asked for any more."""
    for stored in folder.glob(f"*/{_SOURCE}"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            earlier = json.loads(stored.read_text())
            if earlier != source and [file["path"] for file in earlier] == [file["path"] for file in source]:
                shutil.rmtree(stored.parent, ignore_errors=True)


def _write_out(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
