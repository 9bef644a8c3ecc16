"""Operators of graphs, on a device with shapes but no values: nothing waits for the host, all tensors are on the
device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.adapters import ALL_LINEAR, ATTENTION, make_adapter
from tests.conftest import HAS_GPU
from tests.workers.execute.model.native.decoders import make_checkpoint
from triptych.protocol.lora import LoraModule
from triptych.workers.execute.attention.interface import LayerCache
from triptych.workers.execute.model.checkpoint.mapped import Checkpoint
from triptych.workers.execute.model.device.buckets import StepSize
from triptych.workers.execute.model.device.graphs import GraphKey
from triptych.workers.execute.model.lora import load_adapters
from triptych.workers.execute.model.spec.describe import describe_decoder
from triptych.workers.execute.model.spec.ropes import find_ropes
from triptych.workers.execute.sampling.kinds import SamplingKind
from triptych.workers.execute.sampling.sampler import Sampler

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction

from triptych.workers.execute.attention.triton import TritonAttention
from triptych.workers.execute.model.device.runner import DeviceRunner
from triptych.workers.execute.model.fused.decoder import FusedDecoder
from triptych.workers.execute.model.fused.lora import FusedAdapters
from triptych.workers.execute.model.fused.weights import Format, FusedLoader

pytestmark = pytest.mark.skipif(HAS_GPU, reason="the kernels that are launched are interpreted ones")

DEVICE = torch.device("meta")
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
KERNELS = {"_add_norm": 3, "_rotate_write": 1, "_gate_mul": 1}  # in a model of one layer
ADAPTERS = {"_group": 1, "_shrink": 4, "_expand_add": 4}  # more if a step has adapters: its rows, then two a product
OF_ONE_ROW = {"_one_row": 5, "_rotate_write": 1}  # the same, in a step of one token


@pytest.fixture(name="launched")
def fixture_launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launched kernels, by name. They compute nothing; all their arguments must be on the device."""
    launched: Counter[str] = Counter()

    def launch(kernel: Any, *arguments: Any, **_: Any) -> None:
        launched[kernel.fn.__name__] += 1
        assert {x.device.type for x in arguments if isinstance(x, torch.Tensor)} == {"meta"}

    monkeypatch.setattr(InterpretedFunction, "run", launch)
    monkeypatch.setattr("triptych.workers.execute.attention.triton.num_processors", lambda _device: 132)
    return launched


@pytest.fixture(name="make_runner")
def fixture_make_runner(tmp_path: Path) -> Callable[..., DeviceRunner]:
    def make_runner(is_invariant: bool, family: str = "qwen3", **sizes: Any) -> DeviceRunner:
        folder = make_checkpoint(family, tmp_path / "checkpoint", num_hidden_layers=1, **HEADS, **sizes)
        config, checkpoint = AutoConfig.from_pretrained(folder), Checkpoint(folder)
        spec, tensors = describe_decoder(config, checkpoint.shapes()), {name: checkpoint[name] for name in checkpoint}
        targets = ATTENTION if any(spec.has_experts) else ALL_LINEAR
        adapters = load_adapters([LoraModule("a", make_adapter(tmp_path / "a", folder, targets=targets))])
        format_ = Format(torch.bfloat16, is_invariant=is_invariant)
        weights = FusedLoader(spec, tensors, format_=format_, device=DEVICE, progress=lambda *_: None).load()
        pages = torch.zeros(9, 64, spec.num_kv_heads, spec.head_dim, dtype=torch.bfloat16, device=DEVICE)
        kernel = TritonAttention(DEVICE, is_invariant=is_invariant)
        ropes = [rope.tables(512) for rope in find_ropes(config)]
        added = FusedAdapters(weights, adapters)
        decoder = FusedDecoder(weights, kernel, [LayerCache(pages, pages.clone())], ropes=ropes, adapters=added)
        return DeviceRunner(
            [], decoder, Sampler(()), device=DEVICE, max_sampled=8, max_pages=8, capture=lambda run: run,
            is_adapted=True, prefill_tokens=64, decode_rows=4,
        )  # fmt: skip

    return make_runner


@pytest.mark.parametrize("is_adapted", [False, True], ids=["plain", "adapted"])
@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        (SamplingKind.GREEDY, {}),
        (SamplingKind.DRAWN, {"_measure": 1, "_list": 1}),
        (SamplingKind.CUT, {"_measure": 3, "_narrow": 3, "_list": 1, "_finish": 1}),
        (SamplingKind.EDITED, {}),
    ],
)
def test_no_operator_of_a_graph_waits_for_the_host(
    kind: SamplingKind, sampling: dict[str, int], is_adapted: bool, launched: Counter[str],
    make_runner: Callable[..., DeviceRunner], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("triptych.workers.execute.sampling.device.has_compiled_kernels", lambda _device: True)
    with torch.inference_mode():
        make_runner(False)._graph_run(GraphKey(StepSize(4), kind, is_adapted))()
    assert launched == {**KERNELS, **sampling, **(ADAPTERS if is_adapted else {}), "_decode": 1, "_combine": 1}


@pytest.mark.parametrize(
    ("family", "is_adapted", "kernels"),
    [
        ("qwen3", False, OF_ONE_ROW),
        ("qwen3", True, {**KERNELS, **ADAPTERS}),
        ("mixtral", False, {**OF_ONE_ROW, "_choose": 1, "_add_chosen": 1}),
    ],
)
def test_no_operator_of_a_graph_of_one_token_waits_for_the_host(
    family: str, is_adapted: bool, kernels: dict[str, int], launched: Counter[str],
    make_runner: Callable[..., DeviceRunner],
) -> None:  # fmt: skip
    with torch.inference_mode():
        make_runner(False, family)._graph_run(GraphKey(StepSize(1), SamplingKind.GREEDY, is_adapted))()
    assert launched == {**kernels, "_decode": 1, "_combine": 1}


@pytest.mark.parametrize("is_adapted", [False, True], ids=["plain", "adapted"])
def test_no_operator_of_a_graph_with_prompts_waits_for_the_host(
    is_adapted: bool, launched: Counter[str], make_runner: Callable[..., DeviceRunner]
) -> None:
    with torch.inference_mode():
        make_runner(False)._graph_run(GraphKey(StepSize(4, 64), SamplingKind.HOST, is_adapted))()
    chunks = {"_chunk": 1, "_sum_splits": 1}
    assert launched == {**KERNELS, **(ADAPTERS if is_adapted else {}), "_decode": 1, "_combine": 1, **chunks}


@pytest.mark.parametrize("is_adapted", [False, True], ids=["plain", "adapted"])
def test_no_operator_of_a_deterministic_graph_waits_for_the_host(
    is_adapted: bool, launched: Counter[str], make_runner: Callable[..., DeviceRunner]
) -> None:
    with torch.inference_mode():
        make_runner(True)._graph_run(GraphKey(StepSize(4), SamplingKind.GREEDY, is_adapted))()
    assert launched == {**KERNELS, **(ADAPTERS if is_adapted else {}), "_chunk": 1, "_matmul": 5}


@pytest.mark.parametrize("is_adapted", [False, True], ids=["plain", "adapted"])
@pytest.mark.parametrize(
    ("family", "more", "num_adapted"),
    [
        ("gemma2", {}, 4),
        ("olmo2", {"_norm_queries_keys": 1}, 4),
        ("mixtral", {"_choose": 1, "_sort": 1, "_expert_product": 2, "_sum_pairs": 1}, 2),
    ],
)
def test_no_operator_of_another_family_s_graph_waits_for_the_host(
    family: str, more: dict[str, int], num_adapted: int, is_adapted: bool, launched: Counter[str],
    make_runner: Callable[..., DeviceRunner],
) -> None:  # fmt: skip
    with torch.inference_mode():
        make_runner(False, family, sliding_window=512)._graph_run(
            GraphKey(StepSize(4), SamplingKind.GREEDY, is_adapted)
        )()
    added = {**ADAPTERS, "_shrink": num_adapted, "_expand_add": num_adapted} if is_adapted else {}
    assert launched == {**KERNELS, **more, **added, "_decode": 1, "_combine": 1}
