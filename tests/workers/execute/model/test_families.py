"""Greedy output equals transformers' ``generate`` token for token in float32, for any schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import EOS_TOKEN_ID, FAMILIES, RECURRENT, build_tiny_model, make_tiny_model, needs_states
from tests.workers.execute.factories import make_scheduler, run
from tests.workers.execute.sampling.rows import make_row
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.modules.runner import TorchRunner
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.scheduling.states import Segment, StateRows
from triptych.workers.execute.step import StepCut, StepInputs

PAGE_SIZE, NUM_PAGES, NUM_OUTPUT_TOKENS = 4, 60, 8
PROMPTS = [np.random.default_rng(n).integers(3, 250, n).tolist() for n in (1, 5, 17, 23)]

EACH: list[Any] = [*FAMILIES]
EACH += [
    pytest.param(family, marks=needs_states)
    for family in RECURRENT
    if family not in ("olmo_hybrid", "qwen3_next", "bamba", "mamba")
]

Runners = Callable[[str], TorchRunner]


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Runners:
    """Runners of tiny models, each created once."""
    return cache(lambda family: make_runner(family, tmp_path_factory.mktemp(family)))


def make_runner(family: str, folder: Path) -> TorchRunner:
    runner, _ = build_runner(
        ModelConfig(model=family, device="cpu", backend="transformers", threads=1),
        CacheConfig(num_pages=NUM_PAGES, page_size=PAGE_SIZE),
        SchedulerConfig(max_num_seqs=6, prefill_chunk=16),
        model_dir=make_tiny_model(family, folder / "checkpoint"),
        run_dir=folder,
    )
    assert isinstance(runner, TorchRunner)
    return runner


@cache
def generated(family: str) -> list[list[int]]:
    """What transformers generates after each prompt, end of sequence included."""
    model = build_tiny_model(family)
    return [_generate(model, prompt) for prompt in PROMPTS]


def _generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_OUTPUT_TOKENS, pad_token_id=0
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


class Driver:
    """Steps without the scheduler: prompts in chunks, all decodes together, on pages in random order."""

    def __init__(self, runner: TorchRunner, chunk_size: int) -> None:
        self.runner = runner
        self.chunk_size = chunk_size
        rng = np.random.default_rng(0)
        self.free = rng.permutation(np.arange(1, NUM_PAGES + 1, dtype=np.int32)).tolist()
        self.free_rows = rng.permutation(np.arange(1, 9, dtype=np.int32)).tolist()

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        sequences = [self._start(prompt) for prompt in prompts]
        while live := [s for s in sequences if not self._is_done(s)]:
            self._step(sorted(live, key=lambda s: self._num_new(s) > 1))
        return [s.output_tokens.tolist() for s in sequences]

    def _start(self, prompt: list[int]) -> Sequence:
        sequence = make_row(prompt)
        sequence.tokens = np.array(prompt + [0] * NUM_OUTPUT_TOKENS, dtype=np.int32)
        sequence.block_table = [self.free.pop() for _ in range(-(-len(sequence.tokens) // PAGE_SIZE))]
        sequence.state_rows = StateRows(self.free_rows.pop(), self.free_rows.pop())
        return sequence

    def _is_done(self, sequence: Sequence) -> bool:
        output = sequence.output_tokens
        return len(output) == NUM_OUTPUT_TOKENS or (len(output) > 0 and output[-1] == EOS_TOKEN_ID)

    def _num_new(self, sequence: Sequence) -> int:
        return min(self.chunk_size, sequence.num_uncomputed_tokens)

    def _step(self, sequences: list[Sequence]) -> None:
        inputs = self._inputs(sequences, [self._num_new(s) for s in sequences])
        for sequence in sequences:
            sequence.num_computed_tokens += self._num_new(sequence)
        self.runner.launch(inputs)
        for sequence, token in zip(inputs.sampled, self.runner.collect().token_ids, strict=True):
            sequence.tokens[sequence.num_tokens] = token
            sequence.num_tokens += 1

    def _cut(self, sequences: list[Sequence], lengths: list[int]) -> StepCut:
        segments: list[Segment] = []
        for sequence, length in zip(sequences, lengths, strict=True):
            rows = sequence.state_rows
            assert rows is not None
            segments += rows.segments(sequence.num_computed_tokens, length)
            rows.current, rows.next = rows.next, rows.current
        return StepCut.of(segments, num_decodes=sum(n == 1 for n in lengths))

    def _inputs(self, sequences: list[Sequence], lengths: list[int]) -> StepInputs:
        positions = [
            s.num_computed_tokens + np.arange(n, dtype=np.int32) for s, n in zip(sequences, lengths, strict=True)
        ]
        tables = np.zeros((len(sequences), max(len(s.block_table) for s in sequences)), dtype=np.int32)
        for table, sequence in zip(tables, sequences, strict=True):
            table[: len(sequence.block_table)] = sequence.block_table
        ends = np.cumsum(lengths, dtype=np.int32)
        samples = [s.num_computed_tokens + n == s.num_tokens for s, n in zip(sequences, lengths, strict=True)]
        return StepInputs(
            token_ids=np.concatenate([s.tokens[p] for s, p in zip(sequences, positions, strict=True)]),
            positions=np.concatenate(positions),
            slot_mapping=np.concatenate(
                [
                    t[p // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + p % PAGE_SIZE
                    for t, p in zip(tables, positions, strict=True)
                ]
            ),
            query_starts=np.concatenate([np.zeros(1, np.int32), ends]),
            context_lens=np.array([p[-1] + 1 for p in positions], dtype=np.int32),
            block_tables=tables,
            num_decodes=sum(n == 1 for n in lengths),
            sample_rows=(ends - 1)[samples],
            sampled=[s for s, now in zip(sequences, samples, strict=True) if now],
            cut=self._cut(sequences, lengths),
        )


@pytest.mark.parametrize("chunk_size", [1, 7, 512])
@pytest.mark.parametrize("family", EACH)
def test_every_chunk_size_gives_the_tokens_of_transformers(runners: Runners, family: str, chunk_size: int) -> None:
    assert Driver(runners(family), chunk_size).generate(PROMPTS) == generated(family)


@pytest.mark.parametrize("family", ["llama", "gemma2", pytest.param("qwen3_5_text", marks=needs_states)])
def test_batch_mates_change_nothing(runners: Runners, family: str) -> None:
    alone = [Driver(runners(family), 7).generate([prompt])[0] for prompt in PROMPTS]
    assert alone == generated(family)


@pytest.mark.parametrize("family", EACH)
def test_preemption_changes_nothing(runners: Runners, family: str) -> None:
    """The scheduler runs more sequences than fit into the pool, so some are preempted and recomputed."""
    sequences = [make_sequence(index) for index in range(len(PROMPTS) * 2)]
    scheduler = make_scheduler(
        *sequences, num_pages=12, page_size=PAGE_SIZE, max_model_len=48, prefill_chunk=16, max_num_seqs=6,
        num_snapshots=2 if family in RECURRENT else None,
    )  # fmt: skip
    outputs = run(Engine(scheduler, runners(family)))
    assert sum(s.num_preemptions for s in sequences) > 0
    assert [outputs[s.key] for s in sequences] == generated(family) * 2


def make_sequence(index: int) -> Sequence:
    prompt = PROMPTS[index % len(PROMPTS)]
    sequence = make_row(prompt, stop_ids=frozenset({EOS_TOKEN_ID}), max_tokens=NUM_OUTPUT_TOKENS)
    sequence.key, sequence.arrival = (index, 0), index
    sequence.tokens = np.array(prompt + [0] * NUM_OUTPUT_TOKENS, dtype=np.int32)
    return sequence
