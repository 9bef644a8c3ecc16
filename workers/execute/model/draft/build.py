"""Loading a draft model from its checkpoint: like any other model, and with the same vocabulary as its target model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .....protocol.config import ModelConfig
from .....protocol.errors import ConfigError
from .....protocol.tokenizer_files import load_tokenizer_json
from ..backends import Backends
from ..checkpoint.find import attributed_to_draft
from ..facts import no_progress
from ..loaded import Loaded
from ..pool import PoolSize, bytes_per_token
from .model import ON_CPU, DraftModel, Limits

if TYPE_CHECKING:
    import torch

_SCRATCH = "draft-tokenizer"
# In the time of a guess, a GPU reads 160 tokens of a prompt or more (0.6B on an H200). Its graphs have room for 32
# chunks, or for 128 tokens of short ones. As many can be checked together: two of each of 64 sequences.
ON_GPU = Limits(max_rows=64, max_behind=1024, read_with_a_guess=128, max_chunks=32, max_short=128)


@dataclass(frozen=True, slots=True)
class DraftBuild:
    """A draft model in memory, before it has pages."""

    loaded: Loaded
    backends: Backends
    limits: Limits

    @property
    def scratch_bytes(self) -> int:
        """Of the pages for guesses beyond the sequences' own pages."""
        page_tokens = self.backends.cache.page_tokens
        return bytes_per_token(self.loaded.shapes) * page_tokens * self.limits.scratch_pages(page_tokens)

    def make_model(self, size: PoolSize, *, vocab_size: int) -> DraftModel:
        """Build the draft model with as many pages as the target model has; it proposes only ids below ``vocab_size``,
        which the target model knows.
        """
        page_size = self.backends.cache.page_tokens
        num_pages = size.num_pages + self.limits.scratch_pages(page_size)
        return DraftModel(
            self.loaded.make_runner(PoolSize(num_pages, size.max_model_len)),
            num_pages=size.num_pages,
            page_size=page_size,
            vocab_size=vocab_size,
            known_ids=self.loaded.facts.vocab_size,
            limits=self.limits,
        )


def check_setting_of_draft(config: ModelConfig, device: torch.device) -> None:
    """
    Raises:
        ConfigError: a draft model is wanted, but not where it could run.
    """
    size = config.tensor_parallel_size
    where = str(device) if size == 1 else f"tensor_parallel_size {size}"
    if size > 1 or device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"draft_model is {config.draft_model!r}, and on {where} there is none: draft models run on the compiled "
            "kernels of a CPU, and on the fused kernels of one Nvidia GPU",
            param="draft_model",
        )


def load_draft(backends: Backends, folder: Path, run_dir: Path) -> DraftBuild:
    """Load the draft model in ``folder`` for the target model of ``backends``, whose tokenizer is in ``run_dir``.

    Raises:
        ConfigError: it cannot be read, cannot be run by the kernels of the device, or has another vocabulary.
    """
    limits = _limits_on(backends)
    own = _backends_of_draft(backends, folder, limits)
    proofs = own.proofs
    with attributed_to_draft(), _scratch(run_dir) as scratch:
        loaded = own.load_proven(proofs, scratch)
        if loaded is None:
            own = own.with_tokenizer(scratch)
            loaded = own.load_fused(proofs, scratch) or own.load_native(proofs, scratch)
        assert loaded is not None, "the backend was named, so a failure has raised an error"
        if loaded.state_bytes:
            raise ConfigError(f"{loaded.facts.model_type} has recurrent layers, whose states cannot be rolled back")
        _check_vocabulary(load_tokenizer_json(scratch), load_tokenizer_json(run_dir))
    return DraftBuild(loaded, own, limits)


def prove_draft(backends: Backends, folder: Path, run_dir: Path) -> None:
    """Do what ``Backends.prove`` does, for the draft model in ``folder``.

    Raises:
        ConfigError: a start with this draft model would fail.
    """
    own = _backends_of_draft(backends, folder, _limits_on(backends))
    with attributed_to_draft(), _scratch(run_dir) as scratch:
        own.prove(own.proofs, scratch)


def _limits_on(backends: Backends) -> Limits:
    limits = ON_CPU if backends.device.type == "cpu" else ON_GPU
    return limits._replace(max_rows=min(limits.max_rows, backends.scheduler.num_rows))


def _backends_of_draft(backends: Backends, folder: Path, limits: Limits) -> Backends:
    config, on_cpu = backends.config, backends.device.type == "cpu"
    return Backends(
        replace(
            config,
            model=str(folder),
            backend="native" if on_cpu else "fused",
            # Where that costs speed: the bits of a guess do not matter.
            deterministic=config.deterministic and on_cpu,
            draft_model=None,
            lora_modules=(),
        ),
        replace(backends.cache, host_pages=0),
        replace(
            backends.scheduler,
            max_num_seqs=limits.max_rows,
            max_num_batched_tokens=limits.max_step_tokens,
        ),
        backends.device,
        folder,
        no_progress,
        spare_cache=backends.spare_cache,
        is_draft=True,
    )


@contextmanager
def _scratch(run_dir: Path) -> Iterator[Path]:
    """A temporary folder for the draft model's tokenizer, which is not served. It has always the same name: a process
    that is killed meanwhile leaves it to the next one.
    """
    folder = run_dir / _SCRATCH
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_vocabulary(own: str, served: str) -> None:
    """Check that two texts of tokenizer.json give the same ids to the same tokens.

    Raises:
        ConfigError: a token's ids differ.
    """
    if own == served:
        return
    ours, theirs = (_vocabulary(json.loads(text)) for text in (own, served))
    different = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    if different:
        first = min(different)
        ids = " and ".join(f"{vocabulary[first]}" if first in vocabulary else "none" for vocabulary in (ours, theirs))
        raise ConfigError(
            f"{len(different)} of {len(theirs)} tokens have another id than in the main model: "
            f"{first!r:.50}, for example, has {ids}"
        )


def _vocabulary(content: dict[str, Any]) -> dict[str, int]:
    """Return the ids of a tokenizer.json by token, without added tokens, since each model may have its own."""
    vocabulary = content["model"]["vocab"]
    added = {token["content"] for token in content["added_tokens"]}
    if isinstance(vocabulary, dict):
        return {token: token_id for token, token_id in vocabulary.items() if token not in added}
    return {token: token_id for token_id, (token, _) in enumerate(vocabulary) if token not in added}  # Unigram
