"""Adapters that a decoder gets while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from .....protocol.config import ModelConfig
from ...step import Places
from ..checkpoint.stored_weights import family_of
from ..guard.proof import ProofStore
from ..lora import Adapter, load_adapters
from .lora import PackedAdapter, PackedAdapters


@dataclass(frozen=True, slots=True)
class LateAdapters:
    """Loads and packs adapters that another process has proven with this model."""

    proofs: ProofStore
    run_dir: Path
    pack: Callable[[Adapter], PackedAdapter]

    def load(self, config: ModelConfig, places: Places, loaded: PackedAdapters) -> PackedAdapters | None:
        """The adapters of ``config`` at their ``places``; those already ``loaded`` are not read again. None if no
        self-test has run with exactly these adapters.

        Raises:
            ConfigError: one cannot be read, or does not fit the model.
        """
        if replace(self.proofs, config=config).find(self.run_dir) is None:
            return None
        packed = {adapter.name: adapter for adapter in loaded.places if adapter is not None}
        modules = [module for module in config.adapters if module.name not in packed]
        new = load_adapters(modules, family_of(self.proofs.checkpoint))
        packed |= {adapter.name: self.pack(adapter) for adapter in new}
        return PackedAdapters([packed[name] if name is not None else None for name in places])
