"""Adapters of the fused decoder and of transformers' modules on a device, compared with merged weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.adapters import ALL_LINEAR, ATTENTION, make_adapter, merge
from tests.conftest import HAS_GPU
from tests.workers.execute.factories import make_scheduler, run
from tests.workers.execute.model.fused.short_self_test import shorten_self_test
from tests.workers.execute.model.fused.test_decoder import FAMILIES
from tests.workers.execute.model.native.decoders import (
    PAGE_SIZE,
    NativeEngine,
    adapt,
    greedy,
    make_checkpoint,
    make_request,
)
from triptych.protocol.errors import ConfigError
from triptych.protocol.lora import LoraModule
from triptych.workers.execute.attention.forward_context import PagedLayers
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model.device.buckets import StepSize
from triptych.workers.execute.model.device.graphs import CudaGraphCapture, GraphKey
from triptych.workers.execute.model.facts import no_progress
from triptych.workers.execute.model.lora import Adapter, LowRank, load_adapters
from triptych.workers.execute.model.modules.device_forward import TransformersForward
from triptych.workers.execute.model.modules.forward import PagedForward
from triptych.workers.execute.model.modules.lora import TorchAdapters
from triptych.workers.execute.model.modules.self_test import switch_to_pages
from triptych.workers.execute.model.pool import allocate_pool
from triptych.workers.execute.sampling.kinds import SamplingKind
from triptych.workers.execute.sampling.sampler import Sampler
from triptych.workers.execute.scheduling.sequence import Sequence

pytest.importorskip("triton")

from tests.fake_cuda import fake_cuda
from triptych.workers.execute.attention.triton import TritonAttention
from triptych.workers.execute.model.device.runner import DeviceRunner
from triptych.workers.execute.model.grouped_lora import GroupedAdapters
from triptych.workers.execute.model.stacked_lora import StackedAdapters, StackedLinear

DEVICE = "cuda" if HAS_GPU else "cpu"
LENGTHS, MAX_TOKENS = (1, 10, 5), 3
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
TARGETS = {
    "phi3": (("qkv_proj", "down_proj"), ("gate_up_proj", "o_proj")),
    "qwen2": (ALL_LINEAR, ("v_proj", "up_proj")),
    "mixtral": (ATTENTION, ("q_proj",)),
}


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_self_test(monkeypatch)


def make_adapted(family: str, folder: Path, **options: Any) -> NativeEngine:
    """An engine with two adapters, for different modules and with different ranks."""
    checkpoint = make_checkpoint(family, folder / "0", **FAMILIES[family])
    for index, (rank, targets) in enumerate(zip((3, 20), TARGETS[family], strict=True), 1):
        make_adapter(folder / f"a{index}", checkpoint, rank=rank, seed=index, targets=targets)
    modules = tuple(f"{index}={folder}/a{index}" for index in (1, 2))
    return NativeEngine(checkpoint, folder, backend="fused", device=DEVICE, lora_modules=modules, **options)


def requests() -> list[Sequence]:
    """Without an adapter, and with each."""
    return [adapt(make_request(index, length, MAX_TOKENS), index) for index, length in enumerate(LENGTHS)]


@pytest.mark.parametrize(("family", "deterministic"), [("phi3", False), ("qwen2", True), ("mixtral", False)])
def test_greedy_tokens_equal_merged_weights(family: str, deterministic: bool, tmp_path: Path) -> None:
    engine = make_adapted(family, tmp_path, deterministic=deterministic)
    answer = engine.run(*requests(), prefill_chunk=9)
    for index, request in enumerate(requests()):
        folder = merge(tmp_path / "0", tmp_path / f"a{index}", tmp_path / f"{index}") if index else tmp_path / "0"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert answer[index] == greedy(model, request.tokens[: LENGTHS[index]].tolist(), MAX_TOKENS)


def test_fp8_applies_adapters_in_the_dtype_of_its_activations(tmp_path: Path) -> None:
    """The start compares each with merged weights, within the precision of eight bits."""
    engine = make_adapted("qwen2", tmp_path, quantization="fp8", dtype="bfloat16" if HAS_GPU else "float32")
    assert engine.card.backend == "fused fp8"


def test_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3", tmp_path / "0", **FAMILIES["qwen3"])
    other = make_checkpoint("qwen3", tmp_path / "1", **{**FAMILIES["qwen3"], "hidden_size": 96})
    module = f"wrong={make_adapter(tmp_path / 'a', other)}"
    with pytest.raises(ConfigError, match=r"the adapter 'wrong' cannot be served: .* in the adapter"):
        NativeEngine(checkpoint, tmp_path, backend="fused", device=DEVICE, lora_modules=(module,))


def test_adapter_of_experts_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("mixtral", tmp_path / "0", **FAMILIES["mixtral"])
    module = f"wrong={make_adapter(tmp_path / 'a', checkpoint, targets=['w1'])}"
    with pytest.raises(ConfigError, match=r"the adapter 'wrong' cannot be served: .*w1"):
        NativeEngine(checkpoint, tmp_path, backend="fused", device=DEVICE, lora_modules=(module,))


@pytest.fixture(name="gpu")
def fixture_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A real one, or else one that computes on the CPU."""
    with nullcontext() if HAS_GPU else fake_cuda(monkeypatch):
        yield torch.device("cuda")


@pytest.mark.usefixtures("gpu")
def test_fused_decoder_applies_adapters_in_graphs_beside_its_products(tmp_path: Path) -> None:
    """With the tokens of steps without graphs, in which one follows the other."""
    checkpoint = make_checkpoint("qwen3", tmp_path / "0", num_hidden_layers=1, **HEADS)
    modules = tuple(f"{n}={make_adapter(tmp_path / f'a{n}', checkpoint, rank=3 * n, seed=n)}" for n in (1, 2))
    sizes: dict[str, Any] = {"max_num_seqs": 4, "prefill_chunk": 16}
    engine = NativeEngine(checkpoint, tmp_path, backend="fused", device="cuda", lora_modules=modules, **sizes)
    assert isinstance(engine.runner, DeviceRunner)
    engine.runner._capture([GraphKey(StepSize(4), SamplingKind.GREEDY, True)], no_progress)
    found = engine.run(*requests())
    assert engine.runner.num_graph_steps > 0
    assert len({tuple(tokens) for tokens in found}) == len(found)
    engine.runner._graphs = None
    assert engine.run(*requests()) == found


def test_transformers_modules_apply_adapters_in_graphs(gpu: torch.device, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "0", **FAMILIES["qwen2"])
    adapter = make_adapter(tmp_path / "a", checkpoint)
    runner = make_graphed(checkpoint, load_adapters([LoraModule("a", adapter)]), gpu)
    runner.capture_graphs()
    sequences = [adapt(make_request(index, 5, MAX_TOKENS), index) for index in (0, 1)]
    scheduler = make_scheduler(*sequences, num_pages=8, page_size=PAGE_SIZE, max_model_len=64)
    outputs = run(Engine(scheduler, runner))
    assert runner.num_graph_steps == runner.num_steps == MAX_TOKENS
    for sequence, folder in zip(sequences, (checkpoint, merge(checkpoint, adapter, tmp_path / "1")), strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert outputs[sequence.key] == greedy(model, sequence.tokens[:5].tolist(), MAX_TOKENS)


def make_graphed(checkpoint: Path, adapters: list[Adapter], device: torch.device) -> DeviceRunner:
    """A runner of transformers' modules that has graphs."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = loaded.to(device).eval()
    kernel, hooks = TritonAttention(device), TorchAdapters(model, adapters)
    memory = switch_to_pages(model, kernel, max_model_len=64, adapters=hooks)
    layers = PagedLayers(kernel, allocate_pool(memory.pages, 8, page_size=PAGE_SIZE, device=device))
    pages = [pool for cache in layers.caches.values() for pool in cache.pools]
    forward = TransformersForward(PagedForward(model, layers, adapters=hooks), kernel)
    return DeviceRunner(
        pages, forward, Sampler(()), device=device,
        max_sampled=2, max_pages=4, capture=CudaGraphCapture(), is_adapted=True, prefill_tokens=16, decode_rows=2,
    )  # fmt: skip


def test_kernels_add_what_adapters_change_wherever_they_are_compiled(gpu: torch.device, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "0", **FAMILIES["qwen2"])
    [adapter] = load_adapters([LoraModule("a", make_adapter(tmp_path / "a", checkpoint))])
    loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert isinstance(TorchAdapters(loaded, [adapter]).layout, StackedAdapters)
    assert isinstance(TorchAdapters(loaded.to(gpu), [adapter]).layout, GroupedAdapters)


def test_torch_adds_each_row_s_own_adapter_where_no_kernels_run() -> None:
    updates, stacked, linear = make_stacked()
    x, owners = torch.randn(7, 96), [0, 1, 2, 3, 1, 0, 3]
    expected = torch.ones(7, 40, dtype=torch.float64)
    for row, owner in enumerate(owners):
        if owner in updates:
            a, b = updates[owner]
            expected[row] += b.double() @ (a.double() @ x[row].double())
    torch.testing.assert_close(added_to_ones(stacked, linear, x, owners).double(), expected, rtol=1e-5, atol=1e-3)


def test_adapter_that_overflows_only_spoils_its_rows_where_no_kernels_run() -> None:
    _, stacked, linear = make_stacked()
    x = torch.randn(4, 96)
    before = added_to_ones(stacked, linear, x, [0, 1, 2, 3])
    linear.down[8:24] = torch.inf
    after = added_to_ones(stacked, linear, x, [0, 1, 2, 3])
    assert after[2].isnan().any()
    assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])


def make_stacked() -> tuple[dict[int, LowRank], StackedAdapters, StackedLinear]:
    """Three adapters, of which the first and second change a matrix, here by the numbers of the adapters."""
    torch.manual_seed(0)
    each = [LowRank(torch.randn(rank, 96), torch.randn(40, rank)) for rank in (3, 16, 70)]
    stacked = StackedAdapters([Adapter("", {"q": update}) for update in each], torch.device("cpu"))
    linear = stacked.stack({0: each[0], 1: each[1]}, like=torch.empty(0))
    return {1: each[0], 2: each[1]}, stacked, linear


def added_to_ones(stacked: StackedAdapters, linear: StackedLinear, x: torch.Tensor, owners: list[int]) -> torch.Tensor:
    output = torch.ones(len(x), 40)
    linear.add(x, output, stacked.rows_of(torch.tensor(owners, dtype=torch.int32)))
    return output
