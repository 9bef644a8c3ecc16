"""What pages leave room for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.workers.execute.model import sizing
from triptych.workers.execute.model.backends import Backends
from triptych.workers.execute.model.draft.build import ON_GPU, DraftBuild
from triptych.workers.execute.model.facts import no_progress
from triptych.workers.execute.model.loaded import Loaded
from triptych.workers.execute.model.pool import LayerShape, PoolSize


def loaded(overhead: int, num_layers: int) -> Loaded:
    make: Any = lambda size: overhead  # noqa: E731
    facts: Any = SimpleNamespace(context_limit=8)
    return Loaded(facts, torch.float32, "", [LayerShape(1, 1, 1, torch.float32)] * num_layers, make)


def backends_with_9000_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **cache: Any) -> Backends:
    monkeypatch.setattr(sizing, "step_overhead", lambda make, *_: make(PoolSize(1, 8)))
    monkeypatch.setattr(sizing, "available_bytes", lambda device: 9000)
    config = CacheConfig(**cache), SchedulerConfig(max_num_seqs=200)
    return Backends(ModelConfig(), *config, torch.device("cuda"), tmp_path, no_progress)


def test_steps_of_a_draft_model_and_the_pages_of_its_guesses_have_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a token takes 8 bytes of a layer. A guess is followed by fifteen others, at most."""
    backends = backends_with_9000_bytes(monkeypatch, tmp_path, page_size=1, kv_memory_fraction=1.0)
    limits = ON_GPU._replace(max_rows=2)
    draft = DraftBuild(loaded(500, num_layers=1), backends, limits)
    left = 9000 - 1000 - 500 - 2 * 16 * 8
    assert sizing.size_pool(backends, loaded(1000, num_layers=3), draft).num_pages == left // (4 * 8) - 1
    assert sizing.size_pool(backends, loaded(1000, num_layers=3)).num_pages == 8000 // (3 * 8) - 1


def test_pages_whose_number_is_given_need_no_trial_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = backends_with_9000_bytes(monkeypatch, tmp_path, page_size=1, num_pages=50)
    monkeypatch.setattr(sizing, "step_overhead", None)
    assert sizing.size_pool(backends, loaded(1000, num_layers=3)).num_pages == 50
