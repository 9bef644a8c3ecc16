"""A cache of what a start determined about a checkpoint that runs on compiled or fused kernels, for later starts.

Importing transformers takes two of the four seconds of a start on a CPU. It is needed to read the config of any family,
to read any tokenizer, and to prove that the kernels compute the model as defined. All three have the same outcome as
long as the checkpoint, this package, the libraries and the device are the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .....protocol.config import ModelConfig
from .....protocol.errors import ConfigError
from .....protocol.lora import parse_modules
from .....protocol.plain import load_map, make
from .....protocol.tokenizer_files import (
    FACTS_FILE,
    TOKENIZER_FILE,
    is_same_tokenizer,
    load_facts,
    load_tokenizer_json,
    save_tokenizer,
)
from ...kernels.compile import NoCompiler, levels_to_try, library_name
from ...kernels.support import triton_version
from ...user_cache import keep_in_one, note_use, places
from ..checkpoint.sample import sample_of
from ..facts import ModelFacts
from ..spec.decoder import DecoderSpec
from ..spec.ropes import Rope

logger = logging.getLogger(__name__)

_FILE = "proof.json"
_LIBRARIES = ("torch", "transformers", "tokenizers")  # whose versions affect the outcome
_OWN_FOLDERS = tuple(Path(__file__).parents[2] / name for name in ("attention", "kernels", "model"))
_WEIGHTS = ".safetensors"
_MOST_BYTES = 64 << 20  # a larger file is no config or tokenizer, but for example the state of an optimizer
_KEY_SIZE = 32
_NUM_KEPT = 64  # proofs kept in the cache
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The model as described to the kernels, without its weights."""

    spec: DecoderSpec
    ropes: tuple[Rope, ...]  # of its layers
    dtype: str  # of computation: "float32" or "bfloat16"
    facts: ModelFacts
    difference: float  # greatest, between its logits and those of transformers, relative to the greatest logit


@dataclass(frozen=True)
class ProofStore:
    """The location of one proof: a folder of a cache, named by a hash of everything the outcome depends on."""

    checkpoint: Path
    config: ModelConfig
    kv_dtype: str = "model"  # as resolved for the device
    spare_cache: Path | None = None  # for what the user's cache cannot take
    device: torch.device = _CPU

    @cached_property
    def folders(self) -> list[Path]:
        """Where it may be, in order of preference."""
        key = outcome_key(self.checkpoint, self.config, self.form)
        return [place / key for place in places("proofs", self.spare_cache)]

    @cached_property
    def form(self) -> str:
        """What the model is computed in, and by."""
        return f"{self.config.dtype} {self.config.quantization} {self.kv_dtype} {self._kernels()}"

    def _kernels(self) -> str:
        """What computes the model: a compiled library, or Triton's kernels on such a GPU."""
        if self.device.type != "cuda":
            return _library(self.config.kernels)
        name, capability = torch.cuda.get_device_name(self.device), torch.cuda.get_device_capability(self.device)
        return f"fused {self.config.deterministic} {name} {capability} {triton_version()}"

    def find(self, run_dir: Path) -> Proof | None:
        """The stored proof, or None. Writes the tokenizer stored with it to ``run_dir``.

        Raises:
            ConfigError: ``run_dir`` already contains another tokenizer.
        """
        found = (proof for folder in self.folders if (proof := _read(folder, run_dir)) is not None)
        return next(found, None)

    def keep(self, proof: Proof, run_dir: Path) -> None:
        """Store the proof with the tokenizer from ``run_dir``. If that fails, the next start is just slower."""
        what = "the results of the self-test"
        keep_in_one(self.folders, lambda folder: _write(proof, folder, run_dir), what, count=_NUM_KEPT)


def _read(folder: Path, run_dir: Path) -> Proof | None:
    try:
        proof, facts = _from_json((folder / _FILE).read_text()), load_facts(folder)
        is_served = is_same_tokenizer(folder, run_dir)
        tokenizer = "" if is_served else load_tokenizer_json(folder)
    except FileNotFoundError:
        return None
    except (OSError, ConfigError, KeyError, TypeError, ValueError) as error:  # the proof is made again
        logger.warning("cannot read the results of an earlier start's self-test: %s", error)
        return None
    if facts is None:
        return None
    if not is_served:
        save_tokenizer(run_dir, tokenizer, facts)
    note_use(folder)
    return proof


def _write(proof: Proof, folder: Path, run_dir: Path) -> None:
    folder.mkdir()
    (folder / _FILE).write_text(_to_json(proof))
    for name in (TOKENIZER_FILE, FACTS_FILE):
        shutil.copyfile(run_dir / name, folder / name)


def outcome_key(checkpoint: Path, config: ModelConfig, form: str) -> str:
    """A hash of everything that a self-test's outcome depends on; ``form`` is what runs the model. Of weights and other
    large files, it covers size, time and some of the content.
    """
    digest = hashlib.sha256(f"{form}\n".encode())
    modules = parse_modules(config.lora_modules)
    digest.update(digest_of_code())
    add_files(digest, checkpoint, *(file for module in modules for file in module.files))
    return digest.hexdigest()[:_KEY_SIZE]


@cache
def digest_of_code() -> bytes:
    """A hash of what computes, as it is on the disk when this is first called: a process that is forked after an
    upgrade runs what was there before.
    """
    digest = hashlib.sha256(" ".join(version(library) for library in _LIBRARIES).encode())
    for file in sorted(file for folder in _OWN_FOLDERS for file in folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()


def add_files(digest: hashlib._Hash, checkpoint: Path, *others: Path) -> None:
    """Add the files of a checkpoint, and others, to a hash; see ``outcome_key`` about large files."""
    files = sorted(file for file in checkpoint.iterdir() if file.is_file())
    for file in (*files, *others):
        stat = file.stat()
        is_large = file.suffix == _WEIGHTS or stat.st_size > _MOST_BYTES
        digest.update(f"\n{file.name} {stat.st_size} {stat.st_mtime_ns if is_large else ''}\n".encode())
        digest.update(sample_of(file).encode() if is_large else file.read_bytes())


def digest_of(checkpoint: Path) -> str:
    """A hash of the checkpoint alone, for ``ModelCard.checkpoint``."""
    digest = hashlib.sha256()
    add_files(digest, checkpoint)
    return digest.hexdigest()[:_KEY_SIZE]


def _library(kernels: str) -> str:
    """The library's name, which depends on its sources and compiler: other kernels are proven again."""
    try:
        return library_name(levels_to_try(kernels)[0])
    except NoCompiler:
        return "none"


def _to_json(proof: Proof) -> str:
    ropes = [{"frequencies": rope.frequencies.tolist(), "scaling": float(rope.scaling)} for rope in proof.ropes]
    parts = {"spec": dataclasses.asdict(proof.spec), "facts": dataclasses.asdict(proof.facts), "ropes": ropes}
    return json.dumps({**parts, "dtype": proof.dtype, "difference": proof.difference})


def _from_json(text: str) -> Proof:
    parts = load_map(text, _FILE)

    def rope(written: dict[str, Any]) -> Rope:
        # Exact: JSON has the shortest decimals that give the same float64, and every float32 is one.
        return Rope(torch.tensor(written["frequencies"], dtype=torch.float32), float(written["scaling"]))

    return Proof(
        spec=make(DecoderSpec, parts["spec"], "spec"),
        ropes=tuple(map(rope, parts["ropes"])),
        dtype=str(parts["dtype"]),
        facts=make(ModelFacts, parts["facts"], "facts"),
        difference=float(parts["difference"]),
    )
