"""Logprobs of prompts compared with the plain forward pass of transformers, on every kind of runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import make_tiny_model
from tests.workers.execute.factories import make_scheduler
from tests.workers.execute.model.native.decoders import make_request
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.protocol.sampling import SamplingParams
from triptych.protocol.scores import ScoreColumns
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.scheduling.sequence import Key, Sequence

PAGE_SIZE, NUM_PAGES = 16, 64
LENGTHS = (2, 17, 60)


@pytest.fixture(scope="module", params=["transformers", "native"])
def engine_parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A runner, and the model in memory."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    checkpoint = make_tiny_model("llama", folder / "checkpoint")
    runner, _ = build_runner(
        ModelConfig(model="tiny", device="cpu", backend=request.param, dtype="float32"),
        CacheConfig(page_size=PAGE_SIZE, num_pages=NUM_PAGES),
        SchedulerConfig(max_num_seqs=4, prefill_chunk=512),
        model_dir=checkpoint,
        run_dir=folder,
    )
    return runner, AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def scored(index: int, length: int, **params: Any) -> Sequence:
    sequence = make_request(index, length, params.pop("max_tokens", 12))
    sequence.params = SamplingParams(max_tokens=None, prompt_logprobs=3, **params)
    return sequence


def run(engine: Engine) -> dict[Key, ScoreColumns]:
    """The scores of every sequence, with each position once and in order."""
    found: dict[Key, list[ScoreColumns]] = {}
    num_rows: dict[Key, int] = {}
    while engine.has_work:
        outputs = engine.step()
        assert outputs is not None
        for key, scores in outputs.scores.items():
            assert scores.start == num_rows.get(key, 0)
            num_rows[key] = scores.start + len(scores.columns.logprobs)
            found.setdefault(key, []).append(scores.columns)
    return {key: ScoreColumns(*map(np.concatenate, zip(*parts, strict=True))) for key, parts in found.items()}


@torch.inference_mode()
def assert_plain(model: Any, sequence: Sequence, scores: ScoreColumns) -> None:
    prompt = torch.from_numpy(sequence.tokens[: sequence.num_prompt_tokens].astype(np.int64))
    logprobs = model(prompt[None]).logits[0, :-1].float().log_softmax(-1)
    plain = logprobs.gather(1, prompt[1:, None])
    np.testing.assert_allclose(scores.logprobs, plain[:, 0].numpy(), atol=1e-4)
    np.testing.assert_allclose(scores.top_logprobs, logprobs.topk(3).values.numpy(), atol=1e-4)
    np.testing.assert_array_equal(scores.ranks, (logprobs > plain).sum(-1).numpy() + 1)


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_scores_equal_the_plain_forward_pass(engine_parts: tuple[Any, Any], chunk: int) -> None:
    runner, model = engine_parts
    sequences = [scored(i, length) for i, length in enumerate(LENGTHS)]
    mates = [make_request(len(LENGTHS) + i, 20 + i, 10) for i in range(2)]
    scheduler = make_scheduler(
        *sequences, *mates, num_pages=NUM_PAGES, page_size=PAGE_SIZE, prefill_chunk=chunk, max_num_seqs=8
    )
    found = run(Engine(scheduler, runner))
    assert found.keys() == {sequence.key for sequence in sequences}
    for sequence in sequences:
        assert_plain(model, sequence, found[sequence.key])


def test_preemption_changes_no_score(engine_parts: tuple[Any, Any]) -> None:
    runner, model = engine_parts
    sequences = [scored(i, 40, max_tokens=40) for i in range(4)]
    scheduler = make_scheduler(
        *sequences, num_pages=13, page_size=PAGE_SIZE, prefill_chunk=4, max_num_seqs=8, prefix_cache=True
    )
    found = run(Engine(scheduler, runner))
    assert scheduler.roster.num_preemptions > 0
    for sequence in sequences:
        assert_plain(model, sequence, found[sequence.key])


@pytest.mark.parametrize("params", [{"temperature": 1.0, "logprobs": 2}, {"repetition_penalty": 1.5}], ids=str)
def test_scores_are_of_the_raw_logits_whatever_is_sampled(
    engine_parts: tuple[Any, Any], params: dict[str, Any]
) -> None:
    runner, model = engine_parts
    sequences = [scored(i, length, **params) for i, length in enumerate(LENGTHS)]
    scheduler = make_scheduler(*sequences, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    found = run(Engine(scheduler, runner))
    for sequence in sequences:
        assert_plain(model, sequence, found[sequence.key])


def test_prompt_is_scored_without_an_answer(engine_parts: tuple[Any, Any]) -> None:
    runner, model = engine_parts
    sequence = scored(0, 33, max_tokens=0)
    scheduler = make_scheduler(sequence, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    assert_plain(model, sequence, run(Engine(scheduler, runner))[sequence.key])
    assert sequence.finish_reason == "length"
