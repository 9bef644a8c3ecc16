"""Memory that outlives this process: a file that the driver holds and that is used by one process of execute at a time.

It begins with a header that says what is in it, for the next process.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import ClassVar, TypeVar

logger = logging.getLogger(__name__)

File = TypeVar("File", bound="LastingFile")

HEADER_BYTES = 4096  # from the beginning of the file


class LastingFile:
    """A file without a header has nothing in it that counts."""

    magic: ClassVar[bytes]  # the beginning of the header
    what: ClassVar[str]  # is in the file

    def __init__(self, file: int) -> None:
        self._file = file
        self._begin = self.magic

    @classmethod
    def open(cls: type[File], path: Path) -> File | None:
        """None, with a reason in the log, if this process cannot open it."""
        try:
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            cls._note_failure(error)
            return None

    @classmethod
    def _note_failure(cls, error: OSError) -> None:
        logger.info("%s will not outlive this process: %s", cls.what, error)

    def claim(self, model: str) -> None:
        """For this model: if the file is in use for another one, its memory is given back now."""
        self._begin = self.magic + _digest(model.encode())
        if not self._begins_with(self._begin):
            os.ftruncate(self._file, 0)

    def _header(self, content: bytes) -> bytes:
        """The header for ``content`` of the model that was claimed."""
        return self._begin + _digest(content)

    def _begins_with(self, header: bytes) -> bool:
        return os.pread(self._file, len(header), 0) == header

    def _empty(self, num_bytes: int) -> None:
        """Make it a file of so many zeros.

        Raises:
            OSError: it cannot have this size.
        """
        os.ftruncate(self._file, 0)
        os.ftruncate(self._file, num_bytes)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()
