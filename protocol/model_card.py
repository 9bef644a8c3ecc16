"""What execute finds out about the model and the machine, as a file of the run directory that everybody reads.

Which of the adapters that it has loaded are for everybody is said by the driver, in a file beside the card.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from .plain import load_map, make
from .private_file import write_private

CARD_FILE = "model_card.json"  # in the run directory
OFFERED_FILE = "offered.json"  # beside it

T = TypeVar("T")


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
    num_snapshots: int | None = None  # states of recurrent layers that are kept for others; None: it has none
    why_slow: str = ""  # no faster backend runs it here; empty where it is the fastest

    @property
    def keeps_states(self) -> bool:
        """Whether it has recurrent layers, so that sequences cannot fork or be swapped."""
        return self.num_snapshots is not None

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

    def publish(self, run_dir: Path) -> None:
        write_private(run_dir / CARD_FILE, json.dumps(self.to_wire()))

    def to_wire(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Offer:
    """The adapters that new requests may name, as far as execute has loaded them."""

    names: tuple[str, ...]

    def publish(self, run_dir: Path) -> None:
        write_private(run_dir / OFFERED_FILE, json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, text: str) -> Offer:
        """
        Raises:
            ConfigError: see ``ModelCard.read``.
        """
        return make(cls, load_map(text, "the list of adapters"), "the list of adapters")


class _LatestFile(Generic[T]):
    """What a file says, for who asks often: read again only where another one was put there since."""

    def __init__(self, file: Path, parse: Callable[[str], T], known: T) -> None:
        self._file, self._parse = file, parse
        self._version: tuple[int, int] | None = None
        self._said = known

    def read(self) -> T:
        """What was put there last, or else ``known``."""
        try:
            facts = self._file.stat()
        except FileNotFoundError:
            return self._said
        version = facts.st_ino, facts.st_mtime_ns
        if version != self._version:
            self._said, self._version = self._parse(self._file.read_text(encoding="utf-8")), version
        return self._said


class LatestCard:
    """The card of a run directory, and what is offered there, for who asks often."""

    def __init__(self, run_dir: Path, known: ModelCard | None = None) -> None:
        self._card = _LatestFile(run_dir / CARD_FILE, ModelCard.from_json, known)
        self._offer = _LatestFile(run_dir / OFFERED_FILE, Offer.from_json, None)

    def read(self) -> ModelCard | None:
        """What was published last, or else ``known``.

        Raises:
            ConfigError: see ``ModelCard.read``.
        """
        return self._card.read()

    def offered(self) -> dict[str, str]:
        """Digest of each adapter that a new request may name.

        Raises:
            ConfigError: see ``ModelCard.read``.
        """
        offer, card = self._offer.read(), self._card.read()
        if offer is None or card is None:
            return {}
        return {name: digest for name, digest in card.adapters.items() if name in offer.names}
