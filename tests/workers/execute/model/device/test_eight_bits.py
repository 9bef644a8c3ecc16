"""Keys and values in eight bits on the fused decoder and on transformers' modules, which run on Triton's interpreter
and on the fake CUDA device, or on a real one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import HAS_GPU
from tests.tiny import build_tiny_model
from tests.workers.execute.factories import make_beams, make_scheduler
from tests.workers.execute.model.fused.short_self_test import shorten_self_test
from tests.workers.execute.model.native.decoders import NUM_PAGES, NativeEngine, make_checkpoint, make_request
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.attention.interface import AttentionForm, LayerCache
from triptych.workers.execute.attention.reference import ReferenceAttention
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model.device.runner import DeviceRunner
from triptych.workers.execute.model.modules.self_test import switch_to_pages
from triptych.workers.execute.scheduling.sequence import Sequence

pytest.importorskip("triton")

from tests.fake_cuda import fake_cuda
from triptych.workers.execute.kernels.triton_write import rotate_and_write

DEVICE = "cuda" if HAS_GPU else "cpu"
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 40}
SIZES: dict[str, Any] = {"max_num_seqs": 2, "prefill_chunk": 8, "kv_dtype": "int8"}


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_self_test(monkeypatch)


def make_engine(folder: Path, **options: Any) -> NativeEngine:
    checkpoint = make_checkpoint("qwen3", folder / "checkpoint", **SMALL)
    return NativeEngine(checkpoint, folder, **{"backend": "fused", "device": DEVICE, "kv_dtype": "int8", **options})


def requests() -> list[Sequence]:
    return [make_request(i, length, 6) for i, length in enumerate((19, 5, 30))]


def test_backend_names_its_pages(tmp_path: Path) -> None:
    assert make_engine(tmp_path).card.backend == "fused float32, int8 keys and values"


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_batches_preemption_and_shared_prefixes_change_no_token(preemption: str, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, deterministic=True, host_pages=16)
    assert engine.card.backend == "fused float32 deterministic, int8 keys and values"
    alone = [engine.run(request)[0] for request in requests()]
    again = make_request(2, 30, 6)
    again.key, again.arrival = (9, 0), 9
    together = engine.run(*requests(), again, num_pages=5, preemption=preemption, host_pages=16, prefill_chunk=7)
    assert together == [*alone, alone[2]]


def test_beams_copy_their_scales(tmp_path: Path) -> None:
    """They share pages and copy half-full ones: each hypothesis is what its tokens alone would have."""
    engine = make_engine(tmp_path, deterministic=True)

    def best(**options: Any) -> Any:
        beams = make_beams(0, 3, max_tokens=8)
        search = Engine(make_scheduler(*beams, page_size=16, num_pages=NUM_PAGES, **options), engine.runner)
        while search.has_work:
            search.step()
        return [beam.tokens[: beam.num_tokens].tolist() for beam in beams]

    assert best() == best(prefill_chunk=1)


@pytest.mark.skipif(HAS_GPU, reason="there is a real device")
@pytest.mark.slow
def test_fused_decoder_and_modules_give_the_tokens_of_the_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the fake CUDA device: the pool is sized, and steps are warmed up, captured and replayed."""
    found: dict[str, list[list[int]]] = {}
    checkpoint = make_checkpoint("qwen3", tmp_path / "checkpoint", **SMALL)
    for way in ("fused", "modules", "definition"):
        with pytest.MonkeyPatch.context() as patch, fake_cuda(patch):
            if way == "definition":
                name = "triptych.workers.execute.model.modules.build.why_no_triton"
                patch.setattr(name, lambda _device: "the test forbids it")
            backend = "fused" if way == "fused" else "transformers"
            pages = None if way == "fused" else NUM_PAGES
            engine = NativeEngine(checkpoint, tmp_path, **SIZES, backend=backend, device="cuda", num_pages=pages)
            engine.runner.warm_up()
            engine.runner.capture_graphs()
            assert engine.card.backend.endswith(", int8 keys and values")
            assert isinstance(engine.runner, DeviceRunner) == (way != "definition")
            found[way] = engine.run(*requests()[:2], max_num_seqs=2)
            assert way == "definition" or engine.runner.num_graph_steps > 0
    assert found["fused"] == found["modules"] == found["definition"]


@pytest.mark.skipif(HAS_GPU, reason="there is a real device")
@pytest.mark.slow
def test_kernels_pass_their_self_test_in_bfloat16(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3", tmp_path / "checkpoint", **SMALL)
    with pytest.MonkeyPatch.context() as patch, fake_cuda(patch):
        engine = NativeEngine(checkpoint, tmp_path, **SIZES, backend="fused", dtype="bfloat16", device="cuda")
        found = engine.run(make_request(1, 20, 2))
    assert engine.card.backend == "fused bfloat16, int8 keys and values"
    assert [len(tokens) for tokens in found] == [2]


def test_wrong_scales_are_found_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def halve(*arguments: Any, scales: torch.Tensor, **options: Any) -> torch.Tensor:
        query = rotate_and_write(*arguments, scales=scales, **options)
        scales[:, :, :1] *= 0.5
        return query

    monkeypatch.setattr("triptych.workers.execute.model.fused.decoder.rotate_and_write", halve)
    with pytest.raises(ConfigError, match="its logits differ from transformers'"):
        make_engine(tmp_path)


def test_wrong_kernel_is_found_at_the_start() -> None:
    class Forgetful(ReferenceAttention):
        """Attends only to the step's own tokens."""

        def attend(self, cache: LayerCache, query: torch.Tensor, form: AttentionForm) -> torch.Tensor:
            return super().attend(cache, query, form._replace(sliding_window=1))

    with pytest.raises(ConfigError, match="its logits differ"):
        switch_to_pages(build_tiny_model("llama"), Forgetful(), max_model_len=512, has_eight_bit_pages=True)


def test_modules_on_pages_in_eight_bits_pass_their_self_test() -> None:
    memory = switch_to_pages(
        build_tiny_model("llama"), ReferenceAttention(), max_model_len=512, has_eight_bit_pages=True
    )
    assert {shape.dtype for shape in memory.pages.values()} == {torch.int8}
