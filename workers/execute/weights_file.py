"""Packed weights in memory that outlives this process, so that a restart need not read and pack them again.

The header is written when all weights are packed, and the model has passed its self-test. From then on, every process
has the file mapped for reading only, so that the weights can be trusted even after a crash.
"""

from __future__ import annotations

import logging
import os

from .kernels.memory import HUGE_PAGE, Arena, HugeArena, padded
from .lasting_file import LastingFile

logger = logging.getLogger(__name__)

_START = HUGE_PAGE  # of the weights in the file, behind the header


class WeightsFile(LastingFile):
    """One file, for the weights of one model."""

    magic = b"triptych weights 1"
    what = "packed weights"

    def __init__(self, file: int) -> None:
        super().__init__(file)
        self._wanted = b""  # header
        self._arena: Arena | None = None  # that is being filled
        self.is_complete = False  # all weights that are wanted are there

    def find(self, level: str) -> bool:
        """Whether an earlier process has left the weights of the model that was claimed, for kernels of this level."""
        self._wanted = self._header(level.encode())
        self.is_complete = self._begins_with(self._wanted)
        return self.is_complete

    def arena(self, num_bytes: int) -> Arena:
        """Memory with the weights if they were found, or else to fill.

        If the file cannot have this size, or huge pages, it is memory that ends with this process.

        Raises:
            OSError: there is not enough address space.
        """
        num_bytes = padded(num_bytes, HUGE_PAGE)
        if self.is_complete:
            arena = Arena(num_bytes)
            self._protect(arena)
            logger.info("the packed weights of an earlier process are in memory")
            return arena
        try:
            self._empty(_START + num_bytes)
            self._arena = HugeArena(num_bytes, self._file, _START)
        except OSError as error:
            self._note_failure(error)
            return Arena(num_bytes)
        return self._arena

    def complete(self) -> None:
        """The weights are packed, and proven to be right."""
        if self._arena is None:
            return
        self._protect(self._arena)
        os.pwrite(self._file, self._wanted, 0)
        self._arena, self.is_complete = None, True

    def close(self) -> None:
        """The memory is given back, unless it has all weights."""
        if not self.is_complete:
            os.ftruncate(self._file, 0)
        os.close(self._file)

    def _protect(self, arena: Arena) -> None:
        file = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            arena.fill_from(file, _START)
        finally:
            os.close(file)
