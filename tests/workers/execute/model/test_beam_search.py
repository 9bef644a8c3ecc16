"""Beam search on pages equals that of transformers, token for token and score for score, in float32."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny import build_tiny_model, make_tiny_model
from tests.workers.execute.factories import CheckedEngine, make_scheduler, make_sequence
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.protocol.sampling import SamplingParams
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.scheduling.beam_search import Hypothesis
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.step import Runner

# Enough end tokens that hypotheses end at many lengths. The tiny GPT-2 repeats few tokens: without the last ids here,
# which are among these, it would mostly continue to the limit.
EOS = [2, *range(16, 272, 16), 90, 102, 123, 150, 162, 170, 219, 248]
PROMPTS = {"short": [40], "page": [40, 41, 42, 43], "long": [5 + 3 * i for i in range(23)]}
NUM_BEAMS = (2, 5)
MAX_TOKENS = 16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "early": {"early_stopping": True},
    "never": {"early_stopping": "never"},
    "long": {"length_penalty": 2.0},
    "short": {"length_penalty": -0.5},
    "never and short": {"early_stopping": "never", "length_penalty": 0.0},
    "penalty": {"repetition_penalty": 1.3},
    "not too soon": {"min_tokens": 6},
}


class Tiny(NamedTuple):
    runner: Runner
    model: PreTrainedModel
    page_size: int


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A model on pages, and the same weights in transformers."""
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param), backend="transformers")


def make_tiny(family: str, folder: Path, *, backend: str, page_size: int = 4) -> Tiny:
    checkpoint = make_tiny_model(family, folder / "checkpoint", eos_token_id=EOS)
    runner, _ = build_runner(
        ModelConfig(model=str(checkpoint), device="cpu", threads=1, backend=backend, dtype="float32"),
        CacheConfig(num_pages=128, page_size=page_size),
        SchedulerConfig(max_num_seqs=8),
        model_dir=checkpoint,
        run_dir=folder,
    )
    return Tiny(runner, build_tiny_model(family, eos_token_id=EOS), page_size)


def beams_of(prompt: list[int], num_beams: int, max_tokens: int, first: int = 0, **options: Any) -> list[Sequence]:
    beams = []
    for index in range(first, first + num_beams):
        beam = make_sequence(index, num_tokens=len(prompt), max_tokens=max_tokens, stop_ids=frozenset(EOS))
        beam.tokens[: len(prompt)] = prompt
        beam.params = SamplingParams(max_tokens=max_tokens, num_beams=num_beams, **options)
        beam.group_key = (first, 0)
        beams.append(beam)
    return beams


def search(tiny: Tiny, *beams: Sequence, num_pages: int = 128, **config: Any) -> list[Hypothesis]:
    scheduler = make_scheduler(*beams, num_pages=num_pages, page_size=tiny.page_size, max_num_seqs=12, **config)
    engine, found = CheckedEngine(scheduler, tiny.runner), {}
    while engine.has_work:
        step = engine.step()
        assert step is not None
        engine.check()
        found.update(step.progress.hypotheses)
    return [found[beam.key] for beam in beams]


def expected(model: PreTrainedModel, prompt: list[int], num_beams: int, max_tokens: int, **options: Any) -> Any:
    """Sequences without padding, and their scores, from ``generate``."""
    names = {"min_tokens": "min_new_tokens"}
    generate: Any = model.generate
    found = generate(
        torch.tensor([prompt]),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=max_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        eos_token_id=EOS,
        pad_token_id=0,
        **{names.get(name, name): value for name, value in options.items()},
    )
    rows = [row[len(prompt) :].tolist() for row in found.sequences]
    ends = [next((i + 1 for i, token in enumerate(row) if token in EOS), None) for row in rows]
    # An ended hypothesis is padded to the longest; one without an end has all tokens.
    return [row[:end] for row, end in zip(rows, ends, strict=True)], found.sequences_scores.tolist()


# Of the product, three of six for each option, so that each pair of values occurs.
CASES = {
    f"{prompt}-{num_beams}-{options}": (PROMPTS[prompt], num_beams, OPTIONS[options])
    for (i, options), (j, prompt), (k, num_beams) in product(
        enumerate(OPTIONS), enumerate(PROMPTS), enumerate(NUM_BEAMS)
    )
    if (i + j + k) % 2 == 0
}


@cache
def search_case(tiny: Tiny, case: str) -> list[Hypothesis]:
    prompt, num_beams, options = CASES[case]
    return search(tiny, *beams_of(prompt, num_beams, MAX_TOKENS, **options))


@pytest.mark.parametrize("case", CASES)
def test_hypotheses_and_scores_equal_generate(tiny: Tiny, case: str) -> None:
    prompt, num_beams, options = CASES[case]
    tokens, scores = expected(tiny.model, prompt, num_beams, MAX_TOKENS, **options)
    found = search_case(tiny, case)
    assert [h.tokens for h in found] == tokens
    assert [h.score for h in found] == pytest.approx(scores, rel=1e-4, abs=1e-5)


def test_hypotheses_of_these_models_end_at_many_lengths(tiny: Tiny) -> None:
    """Otherwise the tests above would show little about the ends of a search."""
    lengths = {len(hypothesis.tokens) for case in CASES for hypothesis in search_case(tiny, case)}
    assert len(lengths) > 8
    assert MAX_TOKENS in lengths


@pytest.mark.parametrize(
    "config", [{"max_num_batched_tokens": 3}, {"prefill_chunk": 5}, {"prefix_cache": True}], ids=str
)
def test_schedules_change_no_hypothesis(tiny: Tiny, config: dict[str, Any]) -> None:
    prompt = PROMPTS["long"]
    tokens, _ = expected(tiny.model, prompt, 4, 16)
    assert [h.tokens for h in search(tiny, *beams_of(prompt, 4, 16), **config)] == tokens


def test_preempted_search_finds_the_same(tiny: Tiny) -> None:
    prompt = PROMPTS["long"]
    wanted = [expected(tiny.model, prompt, 3, 12)[0], expected(tiny.model, prompt[:9], 3, 12)[0]]
    beams = [*beams_of(prompt, 3, 12), *beams_of(prompt[:9], 3, 12, first=10)]
    found = [h.tokens for h in search(tiny, *beams, num_pages=20)]
    assert [found[:3], found[3:]] == wanted


def test_compiled_decoder_finds_the_same(tmp_path: Path) -> None:
    tiny = make_tiny("llama", tmp_path, backend="native", page_size=16)
    tokens, scores = expected(tiny.model, PROMPTS["long"], 3, 16)
    found = search(tiny, *beams_of(PROMPTS["long"], 3, 16))
    assert [h.tokens for h in found] == tokens
    assert [h.score for h in found] == pytest.approx(scores, rel=1e-4)


def test_samples_of_a_real_model_equal_single_requests(tiny: Tiny) -> None:
    """Prompt pages are shared, and the last one is copied, bit for bit."""

    def samples(*, is_group: bool) -> list[list[int]]:
        sequences = [make_sequence(i, num_tokens=11, speaker=0, max_tokens=20, temperature=1.0) for i in range(3)]
        for sequence in sequences:
            sequence.group_key = (0, 0) if is_group else None
        engine = CheckedEngine(make_scheduler(*sequences, page_size=tiny.page_size, num_pages=128), tiny.runner)
        while engine.has_work:
            engine.step()
        return [np.asarray(s.output_tokens).tolist() for s in sequences]

    assert samples(is_group=True) == samples(is_group=False)
