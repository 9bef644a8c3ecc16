"""Two ranks on a CPU compute what one computes: the same weights and pages, cut by heads."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import msgpack
import numpy as np
import pytest

from tests.tiny import make_tiny_model
from tests.workers.execute.factories import make_scheduler, make_sequences, run
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model import ranks
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.orders import decode_order, encode_order
from triptych.workers.execute.model.ranks import LeadingRunner, OutOfStep
from triptych.workers.execute.model.runner import TorchRunner
from triptych.workers.execute.model.step_runner import trash_decodes, trash_prefill
from triptych.workers.execute.scheduling.moves import Moves

# So few pages that sequences are swapped out and in again: moves of pages are orders too.
PAGE_SIZE, NUM_PAGES, HOST_PAGES = 4, 24, 16


@contextmanager
def runner_of(folder: Path, run_dir: Path, num_ranks: int, **model: Any) -> Iterator[TorchRunner]:
    """A runner of the checkpoint; its ranks end with the block."""
    options = {"device": "cpu", "dtype": "float32", "threads": 1, "backend": "transformers", **model}
    runner, card = build_runner(
        ModelConfig(model="tiny", tensor_parallel_size=num_ranks, **options),
        CacheConfig(page_size=PAGE_SIZE, num_pages=NUM_PAGES, host_pages=HOST_PAGES),
        SchedulerConfig(max_num_seqs=4, prefill_chunk=8),
        model_dir=folder,
        run_dir=run_dir,
        progress=lambda done, total: None,
    )
    assert isinstance(runner, TorchRunner)
    assert ("on 2 ranks" in card.backend) == (num_ranks == 2)
    try:
        yield runner
    finally:
        if isinstance(runner, LeadingRunner):
            runner.ranks.close()


def greedy(runner: TorchRunner) -> tuple[dict[Any, list[int]], int]:
    """What five prompts of different lengths get, and how often one was swapped."""
    scheduler = make_scheduler(num_pages=NUM_PAGES, page_size=PAGE_SIZE, host_pages=HOST_PAGES, preemption="swap")
    engine = Engine(scheduler, runner)
    for length, sequence in zip((3, 19, 8, 11, 5), make_sequences(5, num_tokens=20, max_tokens=24), strict=True):
        sequence.num_prompt_tokens = sequence.num_tokens = length
        engine.add(sequence)
    return run(engine), engine.stats.num_swaps


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_two_ranks_say_what_one_says(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path / "checkpoint")
    logits, tokens = [], []
    for num_ranks in (1, 2):
        with runner_of(folder, tmp_path, num_ranks) as runner:
            logits.append(runner.compute_logits(trash_prefill(16)).numpy())
            runner.warm_up()
            answers, num_swaps = greedy(runner)
            tokens.append(answers)
    assert num_swaps > 0
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)
    assert tokens[0] == tokens[1]


def test_each_rank_has_its_share_of_heads(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "checkpoint")
    with runner_of(folder, tmp_path, 2) as runner:
        assert {cache.keys.shape[2] for cache in runner._layers.caches.values()} == {1}  # of 2
    assert not list(tmp_path.glob("ranks-*"))


@pytest.mark.parametrize(
    ("family", "overrides", "size", "reason"),
    [
        ("llama", {}, 3, "3, which does not divide the model's 4 attention heads"),
        ("llama", {}, 4, "4, which does not divide the model's 2 key/value heads"),
        ("gpt2", {}, 2, "'gpt2' has no tensor-parallel plan"),
    ],
)
def test_model_that_cannot_be_cut_is_refused(
    family: str, overrides: dict[str, Any], size: int, reason: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(family, tmp_path / "checkpoint", **overrides)
    with pytest.raises(ConfigError, match=reason), runner_of(folder, tmp_path, size):
        pass


def test_kernels_of_one_rank_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "checkpoint")
    with (
        pytest.raises(ConfigError, match="backend is 'native' and tensor_parallel_size 2"),
        runner_of(folder, tmp_path, 2, backend="native"),
    ):
        pass


def test_death_of_a_rank_is_told_and_ends_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaths: list[tuple[int, int]] = []
    heard = Event()

    def on_death(rank: int, code: int) -> None:
        deaths.append((rank, code))
        heard.set()

    monkeypatch.setattr(ranks, "_end_with", on_death)
    folder = make_tiny_model("llama", tmp_path / "checkpoint")
    with runner_of(folder, tmp_path, 2) as runner:
        assert isinstance(runner, LeadingRunner)
        runner.ranks._children[0].kill()
        assert heard.wait(20)
        with pytest.raises(OutOfStep) as caught:
            runner.compute_logits(trash_decodes(2))
        assert runner.is_fatal(caught.value)
    assert deaths == [(1, -signal.SIGKILL)]


def test_orders_come_back_as_they_were() -> None:
    step = trash_decodes(3)
    again = decode_order(msgpack.unpackb(encode_order(step)))
    for name in ("token_ids", "positions", "slot_mapping", "query_starts", "context_lens", "block_tables"):
        np.testing.assert_array_equal(getattr(again, name), getattr(step, name))
        assert getattr(again, name).dtype == getattr(step, name).dtype
    moves = Moves(swap_out=((1, 2), (3, 4)), copies=((5, 6),))
    assert decode_order(msgpack.unpackb(encode_order(moves))) == moves
