"""Two ranks on a CPU give the results of one: the same weights and pages, split by heads."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgpack
import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from tests.adapters import ATTENTION, make_adapter
from tests.tiny import LLAMA_LIKE, make_tiny_model
from tests.workers.execute.factories import make_scheduler, make_sequences, run
from tests.workers.execute.model.checkpoint.fp8_checkpoints import make_fp8_pair
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model import backends, sizing
from triptych.workers.execute.model.backends import Backends
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.facts import no_progress
from triptych.workers.execute.model.loaded import Loaded
from triptych.workers.execute.model.modules.build import ModelOnPages, _device_kernel
from triptych.workers.execute.model.modules.runner import TorchRunner
from triptych.workers.execute.model.modules.self_test import LayerMemory
from triptych.workers.execute.model.parallel import ranks
from triptych.workers.execute.model.parallel.group import Group, check_divides
from triptych.workers.execute.model.parallel.orders import decode_order, encode_order
from triptych.workers.execute.model.parallel.ranks import LeadingRunner, OutOfStep
from triptych.workers.execute.model.pool import LayerShape, PoolSize
from triptych.workers.execute.model.states import StateLayout
from triptych.workers.execute.model.step_runner import trash_decodes, trash_prefill, with_adapter
from triptych.workers.execute.scheduling.moves import Moves
from triptych.workers.execute.step import PromptSpan, StepInputs

# So few pages that sequences are swapped, because page moves are commands to the ranks too.
PAGE_SIZE, NUM_PAGES, HOST_PAGES = 4, 24, 16


@pytest.fixture(autouse=True)
def variables() -> Iterator[None]:
    """What the first rank, which is this process, tells transformers in them is gone after the test."""
    with patch.dict(os.environ):
        yield


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
    )
    assert isinstance(runner, TorchRunner)
    assert ("on 2 ranks" in card.backend) == (num_ranks == 2)
    try:
        yield runner
    finally:
        if isinstance(runner, LeadingRunner):
            runner.ranks.close()


def greedy(runner: TorchRunner) -> tuple[dict[Any, list[int]], int]:
    """Tokens for five prompts of different lengths, with two adapters and without, and the number of swaps."""
    scheduler = make_scheduler(num_pages=NUM_PAGES, page_size=PAGE_SIZE, host_pages=HOST_PAGES, preemption="swap")
    engine = Engine(scheduler, runner)
    sequences = make_sequences(5, num_tokens=20, max_tokens=24)
    for length, adapter, sequence in zip((3, 19, 8, 11, 5), (0, 1, 2, 1, 0), sequences, strict=True):
        sequence.num_prompt_tokens = sequence.num_tokens = length
        sequence.adapter, sequence.cache_salt = adapter, str(adapter)
        engine.add(sequence)
    return run(engine), engine.stats.num_swaps


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one_until_one_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All checks with two ranks in one test, because starting them takes seconds. Another family is compared in
    tests/pipeline/test_tensor_parallel.py.
    """
    folder = make_tiny_model("glm4", tmp_path / "checkpoint", **LLAMA_LIKE)  # whose ranks get all inputs of an MLP
    targets = ((*ATTENTION, "gate_up_proj", "down_proj"), ("q_proj", "down_proj"))
    adapters = [
        make_adapter(tmp_path / f"a{i}", folder, rank=3 + 5 * i, seed=i, targets=names)
        for i, names in enumerate(targets)
    ]
    modules = tuple(f"{adapter.name}={adapter}" for adapter in adapters)
    prompt = replace(trash_prefill(16), token_ids=np.arange(3, 19, dtype=np.int32))  # the first embedding is zero
    steps = (prompt, with_adapter(prompt))
    with runner_of(folder, tmp_path, 1, lora_modules=modules) as alone:
        logits = [alone.compute_logits(step).numpy() for step in steps]
        assert np.abs(logits[0] - logits[1]).max() > 1e-2
        answers, _ = greedy(alone)
        embedding = embed(alone, prompt)
        assert heads_of(alone) == {2}
    deaths: queue.Queue[tuple[int, int]] = queue.Queue()
    monkeypatch.setattr(ranks, "_end_with", lambda rank, code: deaths.put((rank, code)))
    with runner_of(folder, tmp_path, 2, lora_modules=modules) as runner:
        for step, expected in zip(steps, logits, strict=True):
            np.testing.assert_allclose(runner.compute_logits(step).numpy(), expected, atol=1e-4)
        np.testing.assert_allclose(embed(runner, prompt), embedding, atol=1e-4)
        runner.warm_up()
        again, num_swaps = greedy(runner)
        assert again == answers
        assert num_swaps > 0
        assert heads_of(runner) == {1}, "each rank has its share of the pages"
        check_death(runner, deaths)
    assert not list(tmp_path.glob("ranks-*"))


@pytest.mark.slow
def test_each_rank_takes_its_share_of_fp8_weights(tmp_path: Path) -> None:
    folder, _ = make_fp8_pair("qwen3_moe", "blocks", tmp_path, hidden_size=160, moe_intermediate_size=136)
    prompt = replace(trash_prefill(16), token_ids=np.arange(3, 19, dtype=np.int32))
    logits = []
    for num_ranks in (1, 2):
        with runner_of(folder, tmp_path, num_ranks) as runner:
            logits.append(runner.compute_logits(prompt).numpy())
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)


def embed(runner: TorchRunner, prompt: StepInputs) -> Any:
    """The hidden state of a step's only prompt, all of whose rows are without logits."""
    last = PromptSpan(prompt.sampled[0], len(prompt.token_ids) - 1, 1)
    nothing = replace(prompt, sample_rows=prompt.sample_rows[:0], sampled=())
    [found] = runner._step(replace(nothing, embedded_rows=prompt.sample_rows, embedded=(last,))).states
    return found.values


def heads_of(runner: TorchRunner) -> set[int]:
    return {cache.keys.shape[2] for cache in runner._forward.layers.caches.values()}


def check_death(runner: TorchRunner, deaths: queue.Queue[tuple[int, int]]) -> None:
    """The death of a rank is reported, and ends the step."""
    assert isinstance(runner, LeadingRunner)
    runner.ranks._children[0].kill()
    assert deaths.get(timeout=20) == (1, -signal.SIGKILL)
    with pytest.raises(OutOfStep) as caught:
        runner.compute_logits(trash_decodes(2))
    assert runner.is_fatal(caught.value)


@pytest.mark.parametrize(
    ("family", "overrides", "size", "reason"),
    [
        ("llama", {}, 3, "3, which does not divide the model's 4 attention heads"),
        ("llama", {}, 4, "4, which does not divide the model's 2 key/value heads"),
        ("gpt2", {}, 2, "'gpt2' has no tensor-parallel plan"),
    ],
)
def test_model_that_cannot_be_split_is_refused(
    family: str, overrides: dict[str, Any], size: int, reason: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(family, tmp_path / "checkpoint", **overrides)
    with pytest.raises(ConfigError, match=reason), runner_of(folder, tmp_path, size):
        pass


def test_single_rank_kernels_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "checkpoint")
    with (
        pytest.raises(ConfigError, match="backend is 'native' and tensor_parallel_size 2"),
        runner_of(folder, tmp_path, 2, backend="native"),
    ):
        pass


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_keys_in_eight_bits_are_split_among_gpus_only(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "read_config", lambda _folder: None)
    monkeypatch.setattr(backends, "check_divides", lambda *_: None)
    group = Group(0, 2, torch.device(device))
    monkeypatch.setattr(ranks, "Ranks", lambda *_, **__: SimpleNamespace(group=group))
    own = Backends(
        ModelConfig(model="tiny", tensor_parallel_size=2), CacheConfig(kv_dtype="int8"), SchedulerConfig(),
        group.device, Path(), no_progress,
    )  # fmt: skip
    if device == "cuda":
        assert own.with_ranks(Path()).group is group
        return
    with pytest.raises(ConfigError, match="kv_dtype is 'int8' and tensor_parallel_size 2"):
        own.with_ranks(Path())


def test_ranks_on_gpus_attend_by_kernels() -> None:
    """By its definition, attention to a long context takes gigabytes, and without them all ranks end."""
    pytest.importorskip("triton")
    model: Any = SimpleNamespace(device=torch.device("cpu"), forward=lambda logits_to_keep: None)
    model.base_model = model  # no head on another model, so nothing to hook into
    facts: Any = SimpleNamespace(eos_token_ids=())
    memory = LayerMemory({0: LayerShape(1, 8, 8, torch.float32)}, StateLayout({}, frozenset()))
    on_pages = ModelOnPages(model, facts, _device_kernel(model.device), memory, model.device, Group(1, 2), None)
    runner = on_pages.make_runner(
        PoolSize(1, 8), page_size=8, num_state_rows=0, sizes={"prefill_tokens": 8, "decode_rows": 1}, ranks=None,
        on_device=lambda forward, caches: pytest.fail("its steps would not be in order with those of other ranks"),
    )  # fmt: skip
    assert isinstance(runner, TorchRunner)
    assert type(runner._forward.layers.kernel).__name__ == "TritonAttention"


def test_each_rank_tries_the_largest_steps_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders of rank 0 would find no rank that listens. Without a trial, steps would share what is left by accident."""
    follower: Any = lambda size: 1000  # noqa: E731
    monkeypatch.setattr(sizing, "step_overhead", lambda make, *_: make(PoolSize(1, 8)))
    monkeypatch.setattr(sizing, "available_bytes", lambda device: 9000)
    facts: Any = SimpleNamespace(context_limit=8)
    leader: Any = pytest.fail
    loaded = Loaded(facts, torch.float32, "", [LayerShape(1, 1, 1, torch.float32)], leader, follower)
    device, group = torch.device("cuda"), Group(0, 2)
    monkeypatch.setattr(Group, "least", lambda self, value: value)
    ranks = Backends(
        ModelConfig(), CacheConfig(page_size=1, kv_memory_fraction=1.0), SchedulerConfig(max_num_seqs=200), device,
        tmp_path, no_progress, group=group,
    )  # fmt: skip
    assert sizing.size_pool(ranks, loaded).num_pages == 8000 // 8 - 1


def test_devices_of_ranks_are_not_chosen_by_the_first_one() -> None:
    with pytest.raises(ConfigError, match="takes cuda:0 to cuda:1, and the device is 'cuda:2': set CUDA_VISIBLE"):
        check_divides(LlamaConfig(), torch.device("cuda:2"), 2)


def test_commands_survive_encoding() -> None:
    step = with_adapter(trash_decodes(3))
    again, plain = (decode_order(msgpack.unpackb(encode_order(order))) for order in (step, trash_decodes(3)))
    assert isinstance(plain, StepInputs)
    assert plain.adapters is None
    for name in ("token_ids", "positions", "slot_mapping", "query_starts", "context_lens", "block_tables", "adapters"):
        np.testing.assert_array_equal(getattr(again, name), getattr(step, name))
        assert getattr(again, name).dtype == getattr(step, name).dtype
    moves = Moves(swap_out=((1, 2), (3, 4)), copies=((5, 6),))
    assert decode_order(msgpack.unpackb(encode_order(moves))) == moves
