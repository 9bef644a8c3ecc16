"""Keeps what a calibration found, so that later starts and restarts round a checkpoint's weights in the same way."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from safetensors.numpy import load, save

from ...kernels.compile import library_name
from ...user_cache import keep_in_one, note_use, places
from ..guard.proof import add_files
from .calibration import Importance

logger = logging.getLogger(__name__)

_VERSION = 1  # of what a calibration finds; increase it when that changes
_DIGEST_SIZE = 32  # bytes
_KEY_SIZE = 32
_NUM_KEPT = 16  # files, of some 70 MB for a model with thousands of experts


@dataclass(frozen=True)
class CalibrationStore:
    """The file of one checkpoint, in the user's cache or in ``spare_cache``: a digest, and behind it safetensors.

    Two starts at the same time find the same. Adapters and settings of the cache do not matter.
    """

    checkpoint: Path
    level: str  # of the kernels, whose results differ in the last bits
    spare_cache: Path | None = None

    @cached_property
    def _key(self) -> str:
        digest = hashlib.sha256(f"{_VERSION} {library_name(self.level)}\n".encode())
        add_files(digest, self.checkpoint)
        return digest.hexdigest()[:_KEY_SIZE]

    @property
    def _files(self) -> list[Path]:
        return [place / self._key for place in places("calibrations", self.spare_cache)]

    def find(self) -> Importance | None:
        """What an earlier start has found, or None."""
        return next((found for file in self._files if (found := self._read(file)) is not None), None)

    def _read(self, file: Path) -> Importance | None:
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("cannot read what an earlier start found out about the inputs of weights: %s", error)
            return None
        if content != self._sealed(content[_DIGEST_SIZE:]):
            logger.warning("%s is damaged and is made again", file)
            return None
        note_use(file)
        return load(content[_DIGEST_SIZE:])

    def keep(self, found: Importance) -> None:
        """Write the file. If that fails, the next start has to calibrate again."""
        content = self._sealed(save(dict(found)))
        what = "what was found out about the inputs of weights"
        keep_in_one(self._files, lambda file: file.write_bytes(content), what, count=_NUM_KEPT)

    def _sealed(self, content: bytes) -> bytes:
        return hashlib.sha256(self._key.encode() + content).digest() + content
