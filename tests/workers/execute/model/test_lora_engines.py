"""Adapters in the engine, on both CPU backends: token for token equal to transformers with merged weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Protocol

import pytest

from tests.adapters import ALL_LINEAR, make_adapter, merge
from tests.workers.execute.model.native.decoders import NativeEngine, adapt, make_checkpoint, make_request, some_of
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.scheduling.sequence import Sequence

LENGTHS = (1, 7, 16, 45, 45, 90)
MAX_TOKENS = 24


class Engines(Protocol):
    def __call__(self, dtype: str = "float32", quantization: str = "none", backend: str = "native") -> NativeEngine: ...


@pytest.fixture(name="folder", scope="module")
def fixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, two adapters, and the checkpoints with each merged."""
    folder = tmp_path_factory.mktemp("lora")
    checkpoint = make_checkpoint("qwen3", folder / "0")
    make_adapter(folder / "a", checkpoint, rank=8, seed=1)
    make_adapter(folder / "b", checkpoint, rank=20, seed=2, targets=("v_proj", "up_proj"))
    for index, name in enumerate("ab", 1):
        merge(checkpoint, folder / name, folder / str(index))
    return folder


@pytest.fixture(name="engines", scope="module")
def fixture_engines(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    modules = tuple(f"{name}={folder / name}" for name in "ab")

    @cache
    def engine_of(dtype: str = "float32", quantization: str = "none", backend: str = "native") -> NativeEngine:
        return NativeEngine(
            folder / "0", tmp_path_factory.mktemp("run"),
            dtype=dtype, quantization=quantization, backend=backend, lora_modules=modules,
        )  # fmt: skip

    return engine_of


def requests() -> list[Sequence]:
    """With each adapter and without, including two that begin alike."""
    made = [make_request(index, length, MAX_TOKENS) for index, length in enumerate(LENGTHS)]
    made[4].tokens[:] = made[3].tokens
    for index, sequence in enumerate(made):
        adapt(sequence, index % 3)
    return made


@pytest.fixture(name="expected", scope="module")
def fixture_expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    merged = [
        NativeEngine(folder / str(i), tmp_path_factory.mktemp("merged"), backend="transformers") for i in range(3)
    ]
    return [merged[r.adapter].greedy(r.tokens[: r.num_prompt_tokens].tolist(), MAX_TOKENS) for r in requests()]


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_greedy_tokens_equal_merged_weights(backend: str, engines: Engines, expected: list[list[int]]) -> None:
    engine = engines(backend=backend)
    assert engine.card.backend.startswith(backend)
    assert expected[3] != expected[4], "one prompt, two adapters"
    for chunk in (1, 7, 512):
        assert engine.run(*requests(), prefill_chunk=chunk) == expected, f"chunks of {chunk}"
    sequences = requests()
    assert engine.run(*sequences, num_pages=9, safety_margin=0.0) == expected
    assert sum(sequence.num_preemptions for sequence in sequences) > 0


@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", "none"), ("bfloat16", "int4"), ("float32", "none")])
def test_batches_chunks_preemption_and_proposals_change_nothing(
    dtype: str, quantization: str, engines: Engines
) -> None:
    engine = engines(dtype, quantization)
    alone = [engine.run(request)[0] for request in requests()]
    for chunk in (1, 7, 512):
        assert engine.run(*requests(), prefill_chunk=chunk, prefix_cache=True) == alone
    assert engine.run(*requests(), num_pages=9, safety_margin=0.0) == alone
    assert engine.run(*requests(), num_speculative_tokens=15, propose=some_of(alone)) == alone


def test_cached_prefix_of_the_same_adapter_changes_nothing(engines: Engines) -> None:
    engine = engines("bfloat16")
    sequences = [adapt(make_request(3, 45, MAX_TOKENS), 1) for _ in range(2)]
    sequences[1].key, sequences[1].arrival = (4, 0), 4
    alone = engine.run(adapt(make_request(3, 45, MAX_TOKENS), 1))
    assert engine.run(*sequences, prefill_chunk=48, prefix_cache=True) == alone * 2
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 32]


@pytest.mark.parametrize(("family", "targets"), [("qwen3", ALL_LINEAR), ("gpt2", ("c_attn", "c_proj"))])
def test_transformers_modules_apply_adapters(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    checkpoint = make_checkpoint(family, tmp_path / "model")
    adapter = make_adapter(tmp_path / "a", checkpoint, rank=4, targets=targets, fan_in_fan_out=True)
    merged = merge(checkpoint, adapter, tmp_path / "merged")
    engine = NativeEngine(checkpoint, tmp_path, backend="transformers", lora_modules=(f"a={adapter}",))
    other = NativeEngine(merged, tmp_path, backend="transformers")
    plain = make_request(0, 9, 12)
    prompt = plain.tokens[:9].tolist()
    assert engine.run(adapt(make_request(0, 9, 12), 1)) == [other.greedy(prompt, 12)]
    assert engine.run(plain) == [engine.greedy(prompt, 12)]


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize(
    ("targets", "why"),
    [(("lm_head",), "it changes lm_head, which is not a linear layer"), (("q_proj",), "is .* in the")],
)
def test_adapter_of_another_model_is_refused(
    backend: str, targets: tuple[str, ...], why: str, folder: Path, tmp_path: Path
) -> None:
    other = make_checkpoint("qwen3", tmp_path / "other", hidden_size=96, tie_word_embeddings=False)
    adapter = make_adapter(tmp_path / "a", other, targets=targets)
    with pytest.raises(ConfigError, match=f"the adapter 'wrong' cannot be served: .*{why}"):
        NativeEngine(folder / "0", tmp_path, backend=backend, lora_modules=(f"wrong={adapter}",))
