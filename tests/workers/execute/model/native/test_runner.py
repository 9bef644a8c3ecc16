"""The compiled decoder in the engine: token for token equal to transformers, in any batch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Protocol

import pytest

from tests import tiny
from tests.tiny import make_tiny_model
from tests.workers.execute.kernels.levels import FASTEST
from tests.workers.execute.model.native.decoders import (
    NativeEngine,
    change_config,
    changed_tensors,
    greedy_choices,
    make_checkpoint,
    make_request,
    pack,
    some_of,
)
from tests.workers.execute.model.native.families import FAMILIES
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.kernels.compile import available_levels, levels_to_try
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.native.runner import NativeRunner
from triptych.workers.execute.scheduling.sequence import Sequence

LENGTHS = (1, 8, 16, 50)
MAX_TOKENS = 12


class Engines(Protocol):
    def __call__(self, family: str, dtype: str = "float32", quantization: str = "none") -> NativeEngine: ...


@pytest.fixture(scope="module", name="engines")
def fixture_engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Creates an engine of a family, once for all tests of this file."""

    @cache
    def engine_of(family: str, dtype: str = "float32", quantization: str = "none") -> NativeEngine:
        folder = tmp_path_factory.mktemp(family)
        checkpoint = make_checkpoint(family, folder / "checkpoint")
        return NativeEngine(checkpoint, folder, dtype=dtype, quantization=quantization)

    return engine_of


def requests() -> list[Sequence]:
    return [make_request(i, length, MAX_TOKENS) for i, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str, engines: Engines) -> None:
    engine = engines(family)
    outputs = engine.run(*requests(), prefill_chunk=512)
    assert outputs == [greedy_choices(engine.model, *each) for each in zip(requests(), outputs, strict=True)]
    for chunk in (1, 7):
        assert engine.run(*requests(), prefill_chunk=chunk) == outputs, f"chunks of {chunk}"
    sequences = requests()
    assert engine.run(*sequences, num_pages=8, safety_margin=0.0) == outputs, "with preemption"
    assert sum(sequence.num_preemptions for sequence in sequences) > 0


@pytest.mark.parametrize(
    "family", ["qwen3", "smollm3", "granite", "phi3", "gemma2", "gemma3_text", "qwen3_moe", "mixtral", "deepseek_v3"]
)
@pytest.mark.parametrize(("dtype", "quantization"), [
    ("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4"),
])  # fmt: skip
def test_batches_and_chunks_change_nothing(family: str, dtype: str, quantization: str, engines: Engines) -> None:
    engine = engines(family, dtype, quantization)
    assert engine.card.backend.startswith("native")
    alone = [engine.run(request)[0] for request in requests()]
    for chunk in (1, 7, 512):
        assert engine.run(*requests(), prefill_chunk=chunk) == alone
    assert engine.run(*requests(), num_speculative_tokens=15, propose=some_of(alone)) == alone


def test_sampled_rows_use_the_sampler(engines: Engines) -> None:
    engine = engines("llama")
    drawn = make_request(0, 9, 12, temperature=1.5)
    greedy = make_request(1, 9, 12)
    together = engine.run(drawn, greedy)
    assert together[1] == engine.run(make_request(1, 9, 12))[0]
    assert together[0] == engine.run(make_request(0, 9, 12, temperature=1.5))[0]
    assert together[0] != engine.run(make_request(0, 9, 12))[0]


def test_time_of_full_steps_is_estimated_from_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = NativeEngine(make_checkpoint("llama", tmp_path / "checkpoint"), tmp_path, num_pages=128).runner
    assert isinstance(runner, NativeRunner)
    monkeypatch.setattr(runner, "_prefill_tokens", 640)
    monkeypatch.setattr(runner, "_decode_rows", 96)
    for decode_s, expected_s in ((1.0, 20.0), (40.0, 60.0)):
        monkeypatch.setattr(runner, "seconds_of", lambda step, d=decode_s: d if step.num_decodes else 2.0)
        assert runner.warm_up() == expected_s


@pytest.mark.parametrize(
    ("seconds", "num_trials"), [([0.03, 0.02, 0.025, 0.01], 3), ([0.06, 0.05, 0.01], 2), ([0.5, 0.1], 1)], ids=str
)
def test_long_step_is_measured_fewer_times(seconds: list[float], num_trials: int, engines: Engines) -> None:
    """A start waits for it, and what disturbs it is a small part of it."""
    runner, left = engines("llama").runner, iter(seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "seconds_of", lambda _step: next(left))
        assert runner.decode_s(1) == min(seconds[:num_trials])
    assert list(left) == seconds[num_trials:]


def test_card_describes_what_runs(engines: Engines) -> None:
    assert engines("llama").card.backend == f"native float32 on {FASTEST}"
    assert engines("qwen3", "bfloat16", "int8").card.backend == f"native int8, int8 keys and values on {FASTEST}"


@pytest.mark.parametrize(
    ("options", "page_size", "why"),
    [
        ({"dtype": "float16"}, 16, "dtype"),
        ({}, 8, "page has 8 tokens"),
        ({"backend": "transformers", "quantization": "int8"}, 16, "transformers"),
    ],
    ids=["dtype", "page size", "contradiction"],
)
def test_impossible_native_backend_is_refused(
    options: dict[str, str], page_size: int, why: str, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=why):
        build_runner(
            ModelConfig(**{"model": str(checkpoint), "device": "cpu", "backend": "native", **options}),  # type: ignore[arg-type]
            CacheConfig(num_pages=16, page_size=page_size),
            SchedulerConfig(),
            model_dir=checkpoint,
            run_dir=tmp_path,
        )


def test_kernels_are_used_by_default_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="triptych.workers.execute.model.backends")
    default = ModelConfig().backend
    engine = NativeEngine(make_checkpoint("llama", tmp_path / "checkpoint"), tmp_path, backend=default)
    assert engine.card.backend == f"native float32 on {FASTEST}"
    (line,) = caplog.messages
    assert f"the compiled kernels run {tmp_path / 'checkpoint'}: float32" in line


def test_kernels_of_a_level_are_used_if_they_are_wanted(tmp_path: Path) -> None:
    checkpoint, wanted = make_checkpoint("llama", tmp_path / "checkpoint"), available_levels()
    assert [levels_to_try(level) for level in wanted] == [[level] for level in wanted]
    assert NativeEngine(checkpoint, tmp_path, kernels=wanted[0]).card.backend == f"native float32 on {wanted[0]}"
    with pytest.raises(ConfigError, match=f"'mmx', this machine can run: auto, {', '.join(wanted)}"):
        NativeEngine(checkpoint, tmp_path, kernels="mmx")


def test_weights_in_float16_run_in_bfloat16(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """OPT, Pythia, Llama 2 and others are published so: on transformers' modules they are several times slower."""
    checkpoint = make_checkpoint("llama", tmp_path / "checkpoint")
    with changed_tensors(checkpoint) as tensors:
        tensors |= {name: tensor.half() for name, tensor in tensors.items()}
    change_config(checkpoint, dtype="float16")
    assert NativeEngine(checkpoint, tmp_path, backend="auto").card.backend == f"native bfloat16 on {FASTEST}"
    assert "its weights are stored in float16, choose dtype float32 to have all of their digits" in caplog.text
    exact = NativeEngine(checkpoint, tmp_path, backend="auto", dtype="float32")
    assert exact.card.backend == f"native float32 on {FASTEST}"
    # Converted to float32, the embedding would take twice the memory of the stored one.
    packed = [pack(checkpoint, FASTEST, format_) for format_ in (Format.BFLOAT16, Format.FLOAT32)]
    assert [weights.model.embedding_is_bf16 for weights in packed] == [1, 0]


def test_other_families_fall_back_and_the_reason_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = NativeEngine(make_tiny_model("bitnet", tmp_path / "model", **tiny.LLAMA_LIKE), tmp_path, backend="auto")
    assert engine.card.backend.startswith("transformers")
    (line,) = caplog.messages
    assert "transformers' modules run the model" in line
    assert "bitnet" in line


def test_transformers_is_used_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "checkpoint")
    monkeypatch.setenv("PATH", "")
    engine = NativeEngine(checkpoint, tmp_path, backend="auto")
    assert engine.card.backend.startswith("transformers")
    assert engine.run(make_request(0, 9, 12)) == [engine.greedy(make_request(0, 9, 12).tokens[:9].tolist(), 12)]
