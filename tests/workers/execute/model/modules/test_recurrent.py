"""Models with recurrent layers: what they need besides pages, what they do not support, and how that is refused.

``test_families.py`` checks that they give transformers' tokens in any chunks and after preemptions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.adapters import ALL_LINEAR, make_adapter, merge
from tests.tiny import build_tiny_model, make_tiny_model, needs_states
from tests.workers.execute.factories import make_scheduler, run
from tests.workers.execute.model.native.decoders import adapt, greedy, make_request
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.protocol.errors import ConfigError
from triptych.protocol.model_card import ModelCard
from triptych.workers.execute.attention.cpu import CpuAttention
from triptych.workers.execute.attention.forward_context import PagedLayers
from triptych.workers.execute.attention.triton import TritonAttention
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.device.runner import DeviceRunner
from triptych.workers.execute.model.modules.device_forward import TransformersForward
from triptych.workers.execute.model.modules.forward import PagedForward
from triptych.workers.execute.model.modules.self_test import switch_to_pages
from triptych.workers.execute.model.pool import allocate_pool
from triptych.workers.execute.model.states import SequenceStates, StateKey, StepCache
from triptych.workers.execute.model.step_runner import StepRunner
from triptych.workers.execute.sampling.sampler import Sampler
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.scheduling.states import num_state_rows

NUM_PAGES, PAGE_SIZE, MAX_TOKENS = 40, 4, 12
IN_RECURRENT_LAYERS = ("in_proj_qkv", "in_proj_z", "out_proj")


def build(checkpoint: Path, *, cache: dict[str, Any] | None = None, **model: Any) -> tuple[StepRunner, ModelCard]:
    return build_runner(
        ModelConfig(model="tiny", device="cpu", threads=1, **model),
        CacheConfig(**{"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, **(cache or {})}),
        SchedulerConfig(max_num_seqs=4, prefill_chunk=5),
        model_dir=checkpoint, run_dir=checkpoint.parent,
    )  # fmt: skip


def greedy_tokens(runner: StepRunner, *requests: Sequence, **options: Any) -> list[list[int]]:
    options = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "max_model_len": 160, "prefill_chunk": 5, **options}
    outputs = run(Engine(make_scheduler(*requests, **{"num_snapshots": 0, **options}), runner))
    return [outputs[request.key] for request in requests]


def expected(checkpoint: Path, request: Sequence) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return greedy(model, request.tokens[: request.num_prompt_tokens].tolist(), MAX_TOKENS)


@needs_states
def test_card_says_that_it_keeps_states_and_why_it_is_slow(tmp_path: Path) -> None:
    _, card = build(make_tiny_model("jamba", tmp_path / "model"))
    assert card.keeps_states
    assert card.backend == "transformers with CpuAttention"
    assert "jamba models are not supported" in card.why_slow
    _, card = build(make_tiny_model("llama", tmp_path / "other"), backend="transformers")
    assert not card.keeps_states


@needs_states
def test_adapters_change_recurrent_layers_only_for_their_requests(tmp_path: Path) -> None:
    checkpoint, folder = make_tiny_model("qwen3_5_text", tmp_path / "model"), tmp_path / "adapter"
    adapter = make_adapter(folder, checkpoint, targets=(*ALL_LINEAR, *IN_RECURRENT_LAYERS))
    runner, _ = build(checkpoint, lora_modules=(f"a={adapter}",))
    requests = [make_request(index, length, MAX_TOKENS) for index, length in enumerate((1, 9, 14))]
    answer = greedy_tokens(runner, requests[0], adapt(requests[1], 1), requests[2])
    merged = merge(checkpoint, adapter, tmp_path / "merged")
    assert answer == [expected(folder, r) for folder, r in zip((checkpoint, merged, checkpoint), requests, strict=True)]
    assert answer[1] != expected(checkpoint, requests[1])


@needs_states
@pytest.mark.parametrize("family", ["qwen3_5_text", "jamba"])
def test_device_runner_passes_states_on(family: str, tmp_path: Path) -> None:
    checkpoint, device = make_tiny_model(family, tmp_path / "model"), torch.device("cpu")
    loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = loaded.eval()
    kernel = TritonAttention(device)
    memory = switch_to_pages(model, kernel, max_model_len=64)
    layers = PagedLayers(kernel, allocate_pool(memory.pages, NUM_PAGES, page_size=PAGE_SIZE, device=device))
    paged = PagedForward(model, layers, states=SequenceStates(memory.states, 6, device))
    forward = TransformersForward(paged, kernel)
    runner = DeviceRunner(
        [pool for cache in layers.caches.values() for pool in cache.pools], forward, Sampler(()), device=device,
        max_sampled=6, max_pages=16, capture=None, prefill_tokens=16, decode_rows=4,
    )  # fmt: skip
    runner.warm_up()
    requests = [make_request(index, length, MAX_TOKENS) for index, length in enumerate((3, 11))]
    assert greedy_tokens(runner, *requests, max_model_len=64) == [expected(checkpoint, request) for request in requests]


@needs_states
def test_model_that_loses_its_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: StepCache, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return torch.zeros_like(self.states[StateKey(self._number, "recurrent", state_idx)])

    monkeypatch.setattr(StepCache, "get_recurrent_state", forget)
    with pytest.raises(ConfigError, match="model family 'mamba2' is computed wrongly"):
        switch_to_pages(build_tiny_model("mamba2"), CpuAttention(), max_model_len=512)


@needs_states
def test_pages_are_counted_even_if_they_hold_nothing(tmp_path: Path) -> None:
    """mamba2 has no attention layer, and its context has no limit."""
    _, card = build(make_tiny_model("mamba2", tmp_path / "model"), cache={"num_pages": None, "max_kv_bytes": 1 << 20})
    assert card.num_pages == (1 << 20) // (1024 * PAGE_SIZE) - 1
    assert card.max_model_len == card.num_pages * PAGE_SIZE


@needs_states
def test_memory_for_states_is_subtracted_from_that_for_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_tiny_model("qwen3_5_text", tmp_path / "model")
    sizes = {"num_pages": None, "max_kv_bytes": 1 << 40, "kv_memory_fraction": 1.0}
    model: Any = build_tiny_model("qwen3_5_text")
    states = switch_to_pages(model, CpuAttention(), max_model_len=512).states.num_bytes(num_state_rows(6, 2))
    page_bytes = 2 * 2 * 16 * 4 * PAGE_SIZE  # keys and values of the only attention layer
    monkeypatch.setattr("triptych.workers.execute.model.sizing.available_bytes", lambda device: states + 9 * page_bytes)
    _, card = build(checkpoint, cache=sizes)
    assert card.num_pages == 8


@needs_states
@pytest.mark.parametrize(
    ("param", "options", "why"),
    [
        ("host_pages", {"cache": {"host_pages": 8}}, "host_pages is 8, the limit is 0: qwen3_5_text has recurrent"),
        ("tensor_parallel_size", {"tensor_parallel_size": 2}, "recurrent layers, tensor_parallel_size must be 1"),
        ("backend", {"backend": "native"}, "cannot run on the native kernels"),
    ],
)
def test_options_excluded_by_states_are_refused_by_name(
    param: str, options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    if param == "tensor_parallel_size":
        pytest.importorskip("accelerate")
    with pytest.raises(ConfigError, match=why) as refusal:
        build(make_tiny_model("qwen3_5_text", tmp_path / "model"), **options)
    assert refusal.value.param == param
