"""The effect of the prefix cache on the logits of a real model in float32: none, or a last bit.

Cached keys and values are the computed ones, bit for bit. With the compiled kernels, where a row does not depend on
others, newly computed ones are the same in any chunks. With torch's they are the same only in the same chunks: a matrix
product of one to three rows, and attention over another number of queries or keys, round differently. So bits are
compared for equal chunks, and values otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import VOCAB_SIZE, make_tiny_model
from tests.workers.execute.factories import make_scheduler, make_sequence, run
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.modules.runner import TorchRunner
from triptych.workers.execute.model.native.runner import NativeRunner
from triptych.workers.execute.scheduling.sequence import Key
from triptych.workers.execute.step import StepInputs, StepResult

PAGE_SIZE = 16
NUM_PAGES = 96
MAX_CHUNK = 2 * PAGE_SIZE
NUM_OUTPUT_TOKENS = 4

RecordedRunner = TorchRunner | NativeRunner
Logits = dict[tuple[Key, int], torch.Tensor]  # by sequence and number of tokens before


class Recorder:
    """A sampler that records its logits."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.logits: Logits = {}

    def finish(self, logits: torch.Tensor, inputs: StepInputs, *options: Any, **more: Any) -> StepResult:
        for row, sequence in zip(logits, inputs.sampled, strict=True):
            self.logits[sequence.key, sequence.num_tokens] = row.clone()
        result: StepResult = self._sampler.finish(logits, inputs, *options, **more)
        return result


def build(family: str, folder: Path, backend: str) -> RecordedRunner:
    make_tiny_model(family, folder)
    built, _ = build_runner(
        ModelConfig(model=str(folder), device="cpu", backend=backend, threads=1, dtype="float32"),
        CacheConfig(num_pages=NUM_PAGES, page_size=PAGE_SIZE),
        SchedulerConfig(max_num_seqs=4, prefill_chunk=MAX_CHUNK),
        model_dir=folder,
        run_dir=folder,
    )
    assert isinstance(built, RecordedRunner)
    built._sampler = Recorder(built._sampler)  # type: ignore[assignment]
    return built


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RecordedRunner:
    return build(request.param, tmp_path_factory.mktemp(request.param), "transformers")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RecordedRunner:
    return build(request.param, tmp_path_factory.mktemp(request.param), "native")


def logits_of(
    runner: RecordedRunner, prompts: list[list[int]], *, together: bool, **options: Any
) -> tuple[Logits, int]:
    """Logits of every token of every answer, and the number of cached tokens."""
    scheduler = make_scheduler(
        page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_model_len=PAGE_SIZE * NUM_PAGES, **options
    )  # fmt: skip
    engine, recorder = Engine(scheduler, runner), runner._sampler
    assert isinstance(recorder, Recorder)
    recorder.logits = {}
    for index, prompt in enumerate(prompts):
        # A request with logprobs uses the sampler in every runner.
        sequence = make_sequence(index, num_tokens=len(prompt), max_tokens=NUM_OUTPUT_TOKENS, logprobs=0)
        sequence.tokens[: len(prompt)] = prompt
        engine.add(sequence)
        if index == 0 or not together:
            run(engine)
            engine.release(sequence.key)
    run(engine)
    assert len(recorder.logits) == NUM_OUTPUT_TOKENS * len(prompts), "a sequence failed, so nothing would be compared"
    return recorder.logits, scheduler.cache.num_hit_tokens


@st.composite
def conversations(draw: st.DrawFn, unit: int) -> list[list[int]]:
    """Prompts that share that many units of tokens with an earlier one, and differ from there on."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    prompts: list[list[int]] = []
    for index in range(draw(st.integers(2, 5))):
        shared: list[int] = []
        if prompts:
            donor = prompts[draw(st.integers(0, len(prompts) - 1))]
            shared = donor[: unit * draw(st.integers(0, (len(donor) - 1) // unit))]
        own = rng.integers(20, VOCAB_SIZE, draw(st.integers(1, 2 * MAX_CHUNK)))
        prompts.append([*shared, 3 + index, *own.tolist()])  # no other prompt continues with this token
    return prompts


@settings(max_examples=8, deadline=None)
@given(num_pages=st.integers(1, 2), choice=st.data())
def test_logits_have_the_same_bits_in_equal_chunks(
    runner: RecordedRunner, num_pages: int, choice: st.DataObject
) -> None:
    chunk = num_pages * PAGE_SIZE
    prompts = choice.draw(conversations(chunk))
    known, num_hit_tokens = logits_of(runner, prompts, together=False, prefix_cache=True, prefill_chunk=chunk)
    computed, _ = logits_of(runner, prompts, together=False, prefix_cache=False, prefill_chunk=chunk)
    assert known.keys() == computed.keys()
    assert [at for at in known if not torch.equal(known[at], computed[at])] == []
    shared = [num_shared(prompts, index) // PAGE_SIZE * PAGE_SIZE for index in range(len(prompts))]
    assert num_hit_tokens == sum(shared)


def num_shared(prompts: list[list[int]], index: int) -> int:
    """Length of the longest prefix of prompt number ``index`` that an earlier one has too."""
    this = prompts[index]
    lengths = [
        next((i for i, (a, b) in enumerate(zip(this, other, strict=False)) if a != b), 0) for other in prompts[:index]
    ]
    return max(lengths, default=0)


@settings(max_examples=5, deadline=None)
@given(chunk=st.integers(3, MAX_CHUNK), prompts=conversations(1))
def test_logits_are_equal_except_for_rounding_in_any_chunks(
    runner: RecordedRunner, chunk: int, prompts: list[list[int]]
) -> None:
    prompts.append(prompts[0])  # all of it but one token is cached
    known, num_hit_tokens = logits_of(runner, prompts, together=True, prefix_cache=True, prefill_chunk=chunk)
    computed, _ = logits_of(runner, prompts, together=True, prefix_cache=False, prefill_chunk=MAX_CHUNK)
    assert num_hit_tokens >= (len(prompts[0]) - 1) // PAGE_SIZE * PAGE_SIZE
    for at in known.keys() & computed.keys():
        torch.testing.assert_close(known[at], computed[at], rtol=2e-4, atol=2e-4)


@settings(max_examples=10, deadline=None)
@given(chunk=st.integers(1, MAX_CHUNK), prompts=conversations(1))
def test_compiled_kernels_give_the_same_bits_in_any_chunks(
    compiled: RecordedRunner, chunk: int, prompts: list[list[int]]
) -> None:
    prompts.append(prompts[0])
    known, num_hit_tokens = logits_of(compiled, prompts, together=True, prefix_cache=True, prefill_chunk=chunk)
    computed, _ = logits_of(compiled, prompts, together=True, prefix_cache=False, prefill_chunk=MAX_CHUNK)
    assert num_hit_tokens >= (len(prompts[0]) - 1) // PAGE_SIZE * PAGE_SIZE
    assert known.keys() == computed.keys()
    assert [at for at in known if not torch.equal(known[at], computed[at])] == []
