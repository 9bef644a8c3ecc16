"""Whole runs on the fake CUDA device: answers equal those of a CPU, and the host waits once per step."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import HAS_GPU
from tests.tiny import needs_states
from tests.workers.execute.factories import Propose, make_beams, make_scheduler, make_sequence, tokens_of
from tests.workers.execute.grammar.only import Only
from tests.workers.execute.model.device.next_token import NextToken
from tests.workers.execute.model.fused.short_self_test import shorten_self_test
from tests.workers.execute.model.native.decoders import NUM_PAGES, NativeEngine, make_checkpoint, make_request, some_of
from tests.workers.execute.model.test_embeddings import embedded
from tests.workers.execute.model.test_embeddings import run as embed
from triptych.protocol.config import ModelConfig
from triptych.workers.execute.attention.device_step import DeviceStep
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model import moves
from triptych.workers.execute.model.device.graphs import CudaGraphCapture
from triptych.workers.execute.model.device.runner import DeviceRunner
from triptych.workers.execute.model.fused.fp8 import defined_scaled
from triptych.workers.execute.model.guard import proof
from triptych.workers.execute.model.guard.proof import ProofStore
from triptych.workers.execute.model.moves import PageMover
from triptych.workers.execute.sampling.sampler import Sampler
from triptych.workers.execute.scheduling.moves import Moves
from triptych.workers.execute.scheduling.pooling import LAST_STATE, MEAN, Pooling
from triptych.workers.execute.scheduling.proposals import CheckCosts
from triptych.workers.execute.scheduling.sequence import Sequence

pytest.importorskip("triton")

from tests.fake_cuda import fake_cuda
from tests.fake_cuda.device import FakeCuda

pytestmark = [
    pytest.mark.skipif(HAS_GPU, reason="there is a real device"),
    # What Triton's interpreter computes with numpy where a GPU says nothing.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in add:RuntimeWarning"),
]

DRAWN: dict[str, Any] = {"temperature": 0.9}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": DRAWN,
    "min_p": {"temperature": 1.5, "min_p": 0.2},
    "cut": {"temperature": 2.0, "top_p": 0.5, "top_k": 9},
    "logprobs": {**DRAWN, "logprobs": 3},
    "logprob of the token alone": {"logprobs": 0},
    "repetition penalty": {**DRAWN, "repetition_penalty": 1.5},
    "other penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {**DRAWN, "top_k": 20, "logit_bias": {3: 4.0, 7: -100.0}},
    "min_tokens": {**DRAWN, "min_tokens": 4, "stop_token_ids": (5, 6)},
}


class Chain(NextToken):
    """A model whose logits depend on the last token alone."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.logits = 3 * torch.randn(self.vocab_size, self.vocab_size, generator=generator)

    def to(self, device: str) -> Chain:
        self.logits = self.logits.to(device)
        return self

    def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
        return self.logits[token_ids[step.logit_rows.long()]]


@pytest.fixture(name="device")
def fixture_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_cuda(monkeypatch) as device:
        yield device


def make_runner(device: str, *, max_proposals: int = 0) -> DeviceRunner:
    runner = DeviceRunner(
        [], Chain().to(device), Sampler(()), device=torch.device(device), max_sampled=8, max_pages=16,
        capture=CudaGraphCapture() if device == "cuda" else None, prefill_tokens=12, decode_rows=4,
        max_proposals=max_proposals,
    )  # fmt: skip
    if device == "cuda":
        runner.warm_up()
        runner.capture_graphs()
    return runner


def propose_some(expected: dict[Any, list[int]]) -> Propose:
    """Proposes the expected tokens, except for every fourth."""

    def propose(sequence: Sequence, max_tokens: int) -> list[int]:
        known = list(enumerate(expected[sequence.key]))[sequence.num_output_tokens :]
        return [(token + (place % 4 == 0)) % NextToken.vocab_size for place, token in known[:max_tokens]]

    return propose


def make_mates(params: dict[str, Any], grammar: Only | None = None) -> list[Sequence]:
    """Two sequences with these parameters, and two of another kind."""
    sequences = [make_sequence(i, max_tokens=6, num_tokens=5, **(params if i < 2 else DRAWN)) for i in range(4)]
    sequences[0].grammar = grammar
    return sequences


def answers(
    runner: DeviceRunner, sequences: list[Sequence], **options: Any
) -> tuple[dict[Any, list[int]], dict[Any, Any]]:
    """The tokens of each sequence, and its logprobs."""
    engine, logprobs = Engine(make_scheduler(*sequences, **options), runner), dict[Any, Any]()
    tokens: dict[Any, list[int]] = {sequence.key: [] for sequence in sequences}
    while engine.has_work:
        outputs = engine.step()
        assert outputs is not None
        for key, _, token in tokens_of(outputs.progress):
            tokens[key].append(token)
        for key, found in outputs.logprobs.items():
            logprobs.setdefault(key, []).append((pytest.approx(found.chosen), found.token_ids.tolist()))
    return tokens, logprobs


def waits_of_steps(device: FakeCuda) -> dict[str, int]:
    """All but the one before a capture, as a kind of step that occurs again becomes a graph."""
    waits = dict(device.waits)
    assert waits.pop("a capture begins", 1) == 1
    return waits


@pytest.mark.parametrize("kinds", [PARAMS.keys() - {"cut"}, {"cut"}], ids=["by operators", "by kernels"])
def test_every_kind_of_sampling_waits_once_per_step(
    kinds: set[str], device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kinds == {"cut"}:  # only one by kernels, as each takes long to interpret
        name = "triptych.workers.execute.sampling.device.has_compiled_kernels"
        monkeypatch.setattr(name, lambda device: device.type == "cuda")
    runner, on_cpu = make_runner("cuda"), make_runner("cpu")
    for kind in sorted(kinds):
        device.forget_counts()
        num_steps, num_graph_steps = runner.num_steps, runner.num_graph_steps
        found = answers(runner, make_mates(PARAMS[kind]))
        num_steps = runner.num_steps - num_steps
        assert waits_of_steps(device) == {"Event.synchronize": num_steps}, kind
        assert not device.pageable, kind
        # With prompts too; of two drawn rows, not in the first run.
        assert runner.num_graph_steps - num_graph_steps >= num_steps - 1, kind
        assert found == answers(on_cpu, make_mates(PARAMS[kind])), kind


def test_steps_with_proposals_are_graphs_that_wait_once(device: FakeCuda) -> None:
    """Each token is drawn with the random number of its place; sequences that get no proposals run alongside."""
    runner, on_cpu = make_runner("cuda", max_proposals=3), make_runner("cpu")
    assert runner.check_costs is not None
    for kind in ("greedy", "drawn", "cut", "logprobs", "repetition penalty", "bias", "min_tokens"):
        expected = answers(on_cpu, make_mates(PARAMS[kind]))
        device.forget_counts()
        num_steps, num_graph_steps = runner.num_steps, runner.num_graph_steps
        costs = CheckCosts(max_tokens=128, beside_prompts=False)
        options = {"propose": propose_some(expected[0]), "num_speculative_tokens": 3, "check_costs": costs}
        sequences = make_mates(PARAMS[kind])
        assert answers(runner, sequences, **options) == expected, kind
        assert max(sequence.chance for sequence in sequences) > 0.5, f"no proposal was right: {kind}"
        num_steps = runner.num_steps - num_steps
        assert waits_of_steps(device) == {"Event.synchronize": num_steps}, kind
        assert not device.pageable, kind
        assert runner.num_graph_steps - num_graph_steps >= num_steps - 1, kind


def test_grammars_wait_once_per_step(device: FakeCuda) -> None:
    grammar, runner = Only(2, 3, 50, 96, vocab_size=NextToken.vocab_size), make_runner("cuda")
    answers(runner, make_mates(DRAWN, grammar))
    device.forget_counts()
    num_steps = runner.num_steps
    found = answers(runner, make_mates(DRAWN, grammar))
    assert device.waits == {"Event.synchronize": runner.num_steps - num_steps}
    assert not device.pageable
    assert found == answers(make_runner("cpu"), make_mates(DRAWN, grammar))
    assert set(next(iter(found[0].values()))) <= {2, 3, 50, 96}


def test_grammar_error_fails_only_its_own_request(device: FakeCuda) -> None:
    sequences = make_mates(DRAWN, Only(vocab_size=NextToken.vocab_size))
    engine = Engine(make_scheduler(*sequences), make_runner("cuda"))
    failed = dict[Any, str]()
    while engine.has_work:
        outputs = engine.step()
        failed |= {} if outputs is None else outputs.progress.failed
    assert list(failed) == [sequences[0].key]
    assert all(sequence.num_output_tokens == 6 for sequence in sequences[1:])


def test_beam_search_with_a_sampled_request(device: FakeCuda) -> None:
    def search(runner: DeviceRunner) -> Any:
        return answers(runner, [*make_beams(0, 2, max_tokens=4), make_sequence(3, max_tokens=6, **DRAWN)])

    assert search(make_runner("cuda")) == search(make_runner("cpu"))


def test_pages_are_swapped_out_and_in(device: FakeCuda) -> None:
    """The stage between them has room for two pages, and steps write to the pages in between."""
    contents = [torch.arange(6 * 4, dtype=torch.float32).view(6, 4), torch.arange(6 * 3).view(6, 3)]
    pools = [content.to("cuda") for content in contents]
    device.pageable.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves, "_STAGE_BYTES", 2 * sum(content[0].nbytes for content in contents))
        mover = PageMover(pools, num_host_pages=4)
    mover(Moves(swap_out=((1, 3), (2, 0), (5, 1)), copies=((3, 2),)))
    for pages in pools:
        pages[1] = pages[5] = -1
    mover(Moves(swap_in=((5, 3), (1, 0), (4, 1))))
    for pages, content in zip(pools, contents, strict=True):
        assert torch.equal(pages.cpu(), content[[0, 2, 3, 3, 5, 1]])
    assert not device.pageable


LENGTHS, MAX_TOKENS = (19, 9, 5, 6), 4
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
STATES_AND_PAGES = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SIZES: dict[str, Any] = {"max_num_seqs": 4, "prefill_chunk": 8}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "fused": ("qwen3", {}),
    "fused with experts, deterministic": ("qwen3_moe", {"deterministic": True}),
    "modules": ("llama", {"backend": "transformers"}),
    "modules with states": ("qwen3_5_text", {}),
}
GUESSED = ("fused with experts, deterministic", "modules")  # more graphs to interpret


def make_requests() -> list[Sequence]:
    params: list[dict[str, Any]] = [{}, {**DRAWN, "top_p": 0.5}, {"logprobs": 2}, {"prompt_logprobs": 1}]
    pairs = zip(LENGTHS, params, strict=True)
    return [make_request(i, length, MAX_TOKENS, **each) for i, (length, each) in enumerate(pairs)]


def embed_on(engine: NativeEngine) -> list[Any]:
    """Embeddings of prompts whose last tokens are computed together, and alone, beside a decode, and of all tokens."""
    lengths = enumerate(((1, LAST_STATE), (9, LAST_STATE), (11, Pooling(MEAN))))
    sequences = [embedded(i, length, engine.card.embedding_size, pooling) for i, (length, pooling) in lengths]
    mate = make_request(3, 2, 2)
    options = {"prefill_chunk": 8, "num_snapshots": engine.card.num_snapshots}
    found = {**embed(engine.runner, sequences[0], **options), **embed(engine.runner, mate, *sequences[1:], **options)}
    return [found[sequence.key] for sequence in sequences]


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[needs_states] * (way == "modules with states")) for way in WAYS]
)
def test_whole_model_gives_the_tokens_of_a_cpu(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the checkpoint to the last token: the pool is sized, and steps are warmed up, captured and replayed."""
    shorten_self_test(monkeypatch)
    family, options = WAYS[way]
    keeps_states = family == "qwen3_5_text"
    checkpoint = make_checkpoint(family, tmp_path / "checkpoint", **(STATES_AND_PAGES if keeps_states else SMALL))
    with pytest.MonkeyPatch.context() as patch, fake_cuda(patch):
        engine = NativeEngine(
            checkpoint, tmp_path, **SIZES,
            **{"backend": "auto", **options, "device": "cuda", "num_pages": None if way == "fused" else NUM_PAGES},
            num_speculative_tokens=3 if way in GUESSED else None,
        )  # fmt: skip
        assert isinstance(engine.runner, DeviceRunner)
        engine.runner.warm_up()
        engine.runner.capture_graphs()
        assert not any(pages[1:].any() for pages in engine.runner._mover._device), "only the trash page is written to"
        found = engine.run(*make_requests(), max_num_seqs=3)  # in the graph of four
        assert keeps_states or engine.runner.num_graph_steps > 0
        if way in GUESSED:
            guesses: dict[str, Any] = {
                "num_speculative_tokens": 3,
                "propose": some_of(found),
                "check_costs": CheckCosts(),
            }
            assert engine.run(*make_requests(), max_num_seqs=3, **guesses) == found
        vectors = embed_on(engine)
    on_cpu = NativeEngine(checkpoint, tmp_path)
    np.testing.assert_allclose(vectors, embed_on(on_cpu), atol=2e-5)
    assert found == on_cpu.run(*make_requests())
    assert found[0] == engine.greedy(make_requests()[0].tokens[: LENGTHS[0]].tolist(), MAX_TOKENS)


@pytest.fixture(name="self_tests")
def fixture_self_tests(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows with every self-test of the fused decoder, all of which are passed."""
    tests: list[object] = []

    def passed(*arguments: object) -> float:
        tests.append(arguments)
        return 0.0

    monkeypatch.setattr("triptych.workers.execute.model.fused.proven._self_test", passed)
    return tests


FUSED: dict[str, Any] = {**SIZES, "backend": "fused", "device": "cuda", "num_pages": NUM_PAGES}


def test_checkpoint_that_passed_on_this_device_is_not_tested_again(tmp_path: Path, self_tests: list[object]) -> None:
    """A restart after a crash need not prove again what the first start has proven."""
    checkpoint = make_checkpoint("qwen3", tmp_path / "checkpoint", **SMALL)
    counts = []
    with pytest.MonkeyPatch.context() as patch, fake_cuda(patch):
        for dtype in ("float32", "float32", "float16"):
            NativeEngine(checkpoint, tmp_path, **FUSED, dtype=dtype)
            counts.append(len(self_tests))
        os.utime(checkpoint / "model.safetensors", ns=(1, 1))
        NativeEngine(checkpoint, tmp_path, **FUSED, dtype="float16")
        patch.setattr(torch.cuda, "get_device_name", lambda device: "another")
        NativeEngine(checkpoint, tmp_path, **FUSED, dtype="float16")
    assert [*counts, len(self_tests)] == [1, 1, 2, 4]


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"kv_dtype": "int8"}], ids=str)
def test_proven_decoder_is_the_same_without_transformers(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, self_tests: list[object]
) -> None:
    """Whose import takes five seconds of a restart on a GPU."""
    checkpoint = make_checkpoint("qwen3", tmp_path / "checkpoint", **SMALL)
    with pytest.MonkeyPatch.context() as patch, fake_cuda(patch):
        first = NativeEngine(checkpoint, tmp_path, **FUSED, **options)
        found = first.run(make_request(1, 9, 3))
        monkeypatch.setitem(sys.modules, "transformers", None)  # to import from it is an error
        second = NativeEngine(checkpoint, tmp_path, **FUSED, **options)
        assert second.run(make_request(1, 9, 3)) == found
    assert len(self_tests) == 1
    assert second.card == replace(first.card, load_s=second.card.load_s)


def test_decoder_on_one_kind_of_device_proves_nothing_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint("qwen3", tmp_path / "checkpoint", **SMALL)
    config, cuda = ModelConfig(model=str(checkpoint)), torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch, fake_cuda(patch):
        stores = [ProofStore(checkpoint, each, device=cuda) for each in (config, replace(config, deterministic=True))]
        folders = [store.folders[0] for store in (*stores, ProofStore(checkpoint, config))]
        for change in ("get_device_name", "get_device_capability"):
            with patch.context() as other:
                other.setattr(torch.cuda, change, lambda device: "another")
                folders.append(ProofStore(checkpoint, config, device=cuda).folders[0])
        monkeypatch.setattr(proof, "triton_version", lambda: "another")
        folders.append(ProofStore(checkpoint, config, device=cuda).folders[0])
    assert len({*folders}) == 6


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_kernels_pass_their_self_test_in_bfloat16(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere Triton is interpreted in float32 only."""
    shorten_self_test(monkeypatch)
    # Interpreted, Triton loses a carry as it rounds to eight bits.
    monkeypatch.setattr("triptych.workers.execute.model.fused.fp8.scaled", defined_scaled)
    checkpoint = make_checkpoint("qwen3", tmp_path / "checkpoint", **SMALL)
    options: dict[str, Any] = {"backend": "fused", "dtype": "bfloat16", "quantization": quantization, "device": "cuda"}
    with pytest.MonkeyPatch.context() as patch, fake_cuda(patch):
        engine = NativeEngine(checkpoint, tmp_path, **{**SIZES, **options})
        found = engine.run(make_request(1, 20, 2), make_request(2, 3, 2))
    assert engine.card.backend == ("fused fp8" if quantization == "fp8" else "fused bfloat16")
    assert [len(tokens) for tokens in found] == [2, 2]
