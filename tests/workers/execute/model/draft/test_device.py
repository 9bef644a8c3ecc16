"""A draft model on the fake CUDA device: its guesses are graphs, and its pages hold what they should."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import HAS_GPU
from tests.workers.execute.factories import make_scheduler, make_sequence
from tests.workers.execute.model.device.next_token import NextToken
from tests.workers.execute.model.draft.small import shrink_draft_steps
from tests.workers.execute.model.fused.short_self_test import shorten_self_test
from tests.workers.execute.model.native.decoders import NativeEngine, make_checkpoint, make_request
from triptych.workers.execute.attention.device_step import DeviceStep
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model.device.buckets import StepSize
from triptych.workers.execute.model.device.graphs import CudaGraphCapture, GraphKey
from triptych.workers.execute.model.device.runner import DeviceRunner
from triptych.workers.execute.model.draft.build import ON_GPU
from triptych.workers.execute.model.draft.device import DraftRunner
from triptych.workers.execute.model.draft.model import DraftModel
from triptych.workers.execute.model.facts import no_progress
from triptych.workers.execute.sampling.sampler import Sampler
from triptych.workers.execute.scheduling.proposals import CheckCosts
from triptych.workers.execute.scheduling.scheduler import Scheduler
from triptych.workers.execute.scheduling.sequence import Sequence

pytest.importorskip("triton")

from tests.fake_cuda import fake_cuda
from tests.fake_cuda.device import FakeCuda

pytestmark = pytest.mark.skipif(HAS_GPU, reason="there is a real device")

PAGE_SIZE, MOST_PAGES = 4, 64
MAX_LEN = 60
COSTS = CheckCosts(max_tokens=128, beside_prompts=False)


class Remembers(NextToken):
    """A model whose logits depend on all tokens before, as its pages have them."""

    def __init__(self, num_pages: int, device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.pages = torch.zeros(num_pages + 1, PAGE_SIZE, dtype=torch.int64).to(device)
        self.logits = (3 * torch.randn(self.vocab_size, self.vocab_size, generator=generator)).to(device)
        self.offsets = torch.arange(PAGE_SIZE).to(device)
        self.places = torch.arange(1024).to(device)

    def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
        cells = self.pages.view(-1)
        cells[step.slot_mapping.long()] = token_ids.long() + 1 + step.positions.long()
        rows = step.logit_rows.long()
        owners = torch.searchsorted(step.query_starts.long(), rows, right=True) - 1
        slots = (step.block_tables[owners].long()[:, :, None] * PAGE_SIZE + self.offsets).flatten(1)
        places = self.places[: slots.shape[1]]
        is_seen = places <= step.positions[rows].long()[:, None]
        state = torch.where(is_seen, cells[slots] * (places + 1), 0).sum(dim=1)
        return self.logits[state % self.vocab_size]


@pytest.fixture(name="device")
def fixture_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_cuda(monkeypatch) as device:
        yield device


def make_runner(kind: type[DeviceRunner], num_pages: int, **sizes: Any) -> DeviceRunner:
    forward = Remembers(num_pages, "cuda")
    return kind(
        [forward.pages], forward, Sampler(()), device=torch.device("cuda"), max_sampled=8,
        max_pages=-(-MAX_LEN // PAGE_SIZE), capture=CudaGraphCapture(), max_proposals=3, max_model_len=MAX_LEN,
        decode_rows=6, **sizes,
    )  # fmt: skip


@pytest.fixture(name="pair")
def fixture_pair(device: FakeCuda) -> tuple[DeviceRunner, DeviceRunner]:
    """A model, and itself as its draft model."""
    limits = ON_GPU._replace(max_rows=6, max_behind=16, max_chunks=4)
    runner = make_runner(DeviceRunner, MOST_PAGES, prefill_tokens=24)
    num_pages = MOST_PAGES + limits.scratch_pages(PAGE_SIZE)
    own = make_runner(DraftRunner, num_pages, prefill_tokens=limits.max_step_tokens)
    sizes = {"num_pages": MOST_PAGES, "page_size": PAGE_SIZE, "vocab_size": 97, "known_ids": 97}
    runner.warm_up()
    runner.capture_graphs()
    runner.proposer = DraftModel(own, limits=limits, **sizes)
    runner.proposer.warm_up(no_progress, is_first=True)
    runner.proposer.measure_costs(runner.decode_s)
    runner.proposer.costs = DraftModel.costs  # as if it were much smaller
    return runner, own


def run(runner: DeviceRunner, *sequences: Sequence, num_proposals: int = 3, **options: Any) -> Scheduler:
    waiting = list(sequences)
    scheduler = make_scheduler(
        page_size=PAGE_SIZE, max_model_len=MAX_LEN, num_speculative_tokens=num_proposals,
        proposer=runner.proposer, check_costs=COSTS, **{"num_pages": MOST_PAGES, "prefix_cache": True, **options},
    )  # fmt: skip
    engine = Engine(scheduler, runner, depth=1)
    while waiting or engine.has_work:
        while waiting and len(scheduler.live) < 6:
            engine.add(waiting.pop(0))
        step = engine.step()
        assert step is not None
        engine.check()
        for key in step.progress.finished:
            engine.release(key)
    return scheduler


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.9},
    "cut": {"temperature": 2.0, "top_p": 0.5, "top_k": 9},
    "bias": {"temperature": 0.9, "logit_bias": {3: 4.0, 7: -100.0}},
}


def make_mates(kind: str) -> list[Sequence]:
    return [make_sequence(i, num_tokens=5 + 7 * i, max_tokens=17, **PARAMS[kind]) for i in range(3)]


def outputs_of(sequences: list[Sequence]) -> list[list[int]]:
    return [sequence.output_tokens.tolist() for sequence in sequences]


def test_guesses_are_graphs_and_right(
    device: FakeCuda, pair: tuple[DeviceRunner, DeviceRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is its own draft model: each is computed from the one before it, which the host has not seen. Few
    unread tokens have graphs of few tokens.
    """
    runner, own = pair
    sizes: list[StepSize] = []
    assert own._graphs is not None
    replay = own._graphs.run

    def recorded(key: GraphKey) -> None:
        sizes.append(key.size)
        replay(key)

    monkeypatch.setattr(own._graphs, "run", recorded)
    for kind in ("greedy", "drawn", "cut"):
        plain, sequences = make_mates(kind), make_mates(kind)
        run(runner, *plain, num_proposals=0)
        device.forget_counts()
        before = [(each.num_steps, each.num_graph_steps) for each in pair]
        proposals = run(runner, *sequences).proposals
        assert outputs_of(sequences) == outputs_of(plain)
        assert proposals.num_proposed == proposals.num_accepted > 20
        steps = [each.num_steps - num_steps for each, (num_steps, _) in zip(pair, before, strict=True)]
        assert steps[0] < 17
        assert device.waits == {"Event.synchronize": sum(steps)}
        assert not device.pageable
        assert own.num_graph_steps - before[1][1] == steps[1] > 0
    assert {size.num_chunk_tokens for size in sizes} == {0, 16, 64}


def test_draft_model_tracks_the_content_of_its_pages(pair: tuple[DeviceRunner, DeviceRunner]) -> None:
    """Through preemptions, shared prefixes and evictions."""
    num_preemptions = 0
    for seed in range(4):
        dice = random.Random(seed)
        sequences = []
        for index in range(12):
            lengths: Any = {"num_tokens": dice.randint(3, 40), "max_tokens": dice.choice([4, 19])}
            sequence = make_sequence(index, **lengths, **PARAMS[dice.choice(list(PARAMS))])
            if dice.random() < 0.5:
                shared = range(20, 20 + min(12, sequence.num_tokens))
                sequence.tokens[: len(shared)] = shared
            sequences.append(sequence)
        options = {"num_pages": (16, 24, MOST_PAGES)[seed % 3], "prefill_chunk": 8, "max_num_seqs": 6}
        scheduler = run(pair[0], *sequences, **options)
        num_preemptions += sum(sequence.num_preemptions for sequence in sequences)
        assert scheduler.proposals.num_proposed == scheduler.proposals.num_accepted > 0
        assert all(len(sequence.output_tokens) == sequence.max_tokens for sequence in sequences)
    assert num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_pages": None}, {"num_pages": 16, "deterministic": True}], ids=str)
def test_fused_decoder_guesses_for_itself(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two checkpoints to the last token, on as many pages as have room, and on a few."""
    shorten_self_test(monkeypatch)
    shrink_draft_steps(monkeypatch)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    checkpoint = make_checkpoint("qwen3", tmp_path / "checkpoint", **sizes)
    with pytest.MonkeyPatch.context() as patch, fake_cuda(patch):
        engine = NativeEngine(
            checkpoint, tmp_path, backend="fused", device="cuda", max_num_seqs=2, prefill_chunk=8,
            dtype="float32", draft=checkpoint, num_speculative_tokens=3, **options,
        )  # fmt: skip
        assert isinstance(engine.runner, DeviceRunner)
        engine.runner.warm_up()
        engine.runner.capture_largest()
        proposer = engine.runner.proposer
        assert isinstance(proposer, DraftModel)
        proposer.warm_up(no_progress, is_first=False)
        proposer.measure_costs(engine.runner.decode_s)
        assert all(costs.token > 0 for costs in proposer.costs)
        proposer.costs = DraftModel.costs
        ways: Any = ({}, {"num_speculative_tokens": 3, "check_costs": COSTS})
        answers, num_steps, num_graph_steps = [], [engine.runner.num_steps], proposer.runner.num_graph_steps
        for each in ways:
            requests = [make_request(i, length, 9, temperature=0.8 * i) for i, length in enumerate((19, 5))]
            answers.append(engine.run(*requests, **each))
            num_steps.append(engine.runner.num_steps)
        without, with_guesses = np.diff(num_steps)
    assert answers[0] == answers[1]
    assert with_guesses <= without - 3
    assert proposer.runner.num_graph_steps > num_graph_steps
