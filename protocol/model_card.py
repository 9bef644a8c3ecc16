"""What execute learns about the model and the machine, published as a file in the run directory.

Which of the loaded adapters are offered to clients is decided by the driver, in a second file beside the card.
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
    """Published once the model is loaded, and kept across restarts."""

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
    max_live: int  # sequences that execute holds at once
    load_s: float
    adapters: dict[str, str] = field(default_factory=dict)  # name -> digest
    num_snapshots: int | None = None  # of states of recurrent layers; None: the model has no such layers
    embedding_size: int = 0  # values of an embedding; 0: it makes none
    why_no_embeddings: str = ""
    pooling: str = "lasttoken"  # how an embedding is made of the states of a prompt, as in sentence-transformers
    normalizes_embeddings: bool = True  # whether they have length 1
    prompts: dict[str, str] = field(default_factory=dict)  # instructions for texts to embed, by name
    default_prompt: str = ""  # the name of the one in front of a text that names none; empty: none is
    can_generate: bool = True  # False: it has no head, so that it only makes embeddings
    why_slow: str = ""  # why no faster backend runs it here; empty if it is the fastest
    kv_dtype: str = "model"  # of keys and values: model (its own dtype) or int8
    sampling: dict[str, float] = field(default_factory=dict)  # values that its files recommend, as in SamplingParams
    # What a guess of its draft model costs in a step of one sequence, of two, ..., and what the first one costs in
    # addition, as shares of a step without guesses; as measured at the first start.
    guess_costs: tuple[tuple[float, float], ...] = ()
    full_step_s: float = 0.0  # duration of a step that is as large as a step may be, as measured at the first start
    checkpoint: str = ""  # a hash of its files; of large ones, of their sizes, times and some of their content

    @property
    def keeps_states(self) -> bool:
        """Whether it has recurrent layers, whose states can neither be swapped nor take a token back."""
        return self.num_snapshots is not None

    @classmethod
    def read(cls, run_dir: Path) -> ModelCard | None:
        """What execute has published in ``run_dir``; None before that.

        Raises:
            ConfigError: the file is not a model card, or a field is unknown, missing or of the wrong type.
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
    """The adapters that new requests may name, provided execute has loaded them."""

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
    """A file's parsed content for frequent readers: read again only after it was replaced."""

    def __init__(self, file: Path, parse: Callable[[str], T], known: T) -> None:
        self._file, self._parse = file, parse
        self._version: tuple[int, int] | None = None
        self._said = known

    def read(self) -> T:
        """The current content, or ``known`` while there is no file."""
        try:
            facts = self._file.stat()
        except FileNotFoundError:
            return self._said
        version = facts.st_ino, facts.st_mtime_ns
        if version != self._version:
            self._said, self._version = self._parse(self._file.read_text(encoding="utf-8")), version
        return self._said


class LatestCard:
    """The card of a run directory, and the adapters offered there, for frequent readers."""

    def __init__(self, run_dir: Path, known: ModelCard | None = None) -> None:
        self._card = _LatestFile(run_dir / CARD_FILE, ModelCard.from_json, known)
        self._offer = _LatestFile(run_dir / OFFERED_FILE, Offer.from_json, None)

    def read(self) -> ModelCard | None:
        """The card published last, or ``known`` while there is none.

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
