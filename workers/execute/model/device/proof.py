"""A cache of which checkpoints have passed the self-test of the fused kernels, and on which device.

On a GPU, too, a restart after a crash would otherwise compare the model with transformers again while clients wait.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from .....protocol.config import ModelConfig
from ...kernels.support import triton_version
from ...user_cache import cache_folder, keep_newest, note_use
from ..guard.proof import outcome_key

logger = logging.getLogger(__name__)

_SUFFIX, _NUM_KEPT = ".passed", 64


@dataclass(frozen=True)
class DeviceProof:
    """An empty file, named by a hash of everything the outcome depends on. Only for CUDA devices: elsewhere the kernels
    are interpreted, in tests.
    """

    checkpoint: Path
    config: ModelConfig
    device: torch.device
    kv_dtype: str = "model"  # as resolved for the device

    @cached_property
    def _file(self) -> Path:
        name, capability = torch.cuda.get_device_name(self.device), torch.cuda.get_device_capability(self.device)
        config = self.config
        form = f"{config.dtype} {config.quantization} {self.kv_dtype} {config.deterministic}"
        form += f" {name} {capability} {triton_version()}"
        return cache_folder() / "device_proofs" / (outcome_key(self.checkpoint, config, form) + _SUFFIX)

    def exists(self) -> bool:
        if self.device.type != "cuda":
            return False
        try:
            found = self._file.exists()
        except OSError:  # no such folder can be there, or it cannot be read
            return False
        if found:
            note_use(self._file)
        return found

    def keep(self) -> None:
        """Note that the self-test was passed. If that fails, the next start is just slower."""
        if self.device.type != "cuda":
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()
            keep_newest(self._file.parent, f"*{_SUFFIX}", _NUM_KEPT)
        except OSError as error:
            logger.info("cannot store that the self-test was passed for the next start: %s", error)
