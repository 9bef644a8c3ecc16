"""What execute finds out about the model and the machine, as a file of the run directory that everybody reads."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .plain import load_map, make
from .private_file import write_private

CARD_FILE = "model_card.json"  # in the run directory


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Published once the model is loaded, and kept over restarts."""

    model: str  # as asked for
    model_type: str  # "llama", "qwen3", ..., "hash-lm"
    backend: str  # which implementation runs it
    num_parameters: int
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    eos_token_ids: tuple[int, ...]
    page_size: int
    num_pages: int  # without the trash page
    max_num_seqs: int
    max_live: int
    load_s: float
    adapters: dict[str, str] = field(default_factory=dict)  # digest of each, by its name
    withdrawn: tuple[str, ...] = ()  # those that are being unloaded
    why_slow: str = ""  # no faster backend runs it here; empty where it is the fastest

    @classmethod
    def read(cls, run_dir: Path) -> ModelCard | None:
        """What execute has published in ``run_dir``; None before that.

        Raises:
            ConfigError: the file is no model card, or a field is unknown, missing or of the wrong type.
        """
        try:
            text = (run_dir / CARD_FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return cls.from_json(text)

    @classmethod
    def from_json(cls, text: str) -> ModelCard:
        """
        Raises:
            ConfigError: see ``read``.
        """
        return make(cls, load_map(text, "the model card"), "the model card")

    @property
    def offered(self) -> dict[str, str]:
        """Digest of each adapter that a new request may name."""
        return {name: digest for name, digest in self.adapters.items() if name not in self.withdrawn}

    def publish(self, run_dir: Path) -> None:
        write_private(run_dir / CARD_FILE, json.dumps(self.to_wire()))

    def to_wire(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class LatestCard:
    """The card of a run directory for who asks often: read again only where another was published since."""

    def __init__(self, run_dir: Path, known: ModelCard | None = None) -> None:
        self._run_dir = run_dir
        self._version: tuple[int, int] | None = None
        self._card = known

    def read(self) -> ModelCard | None:
        """What was published last, or else ``known``.

        Raises:
            ConfigError: see ``ModelCard.read``.
        """
        try:
            facts = (self._run_dir / CARD_FILE).stat()
        except FileNotFoundError:
            return self._card
        version = facts.st_ino, facts.st_mtime_ns
        if version != self._version:
            self._card, self._version = ModelCard.read(self._run_dir), version
        return self._card
