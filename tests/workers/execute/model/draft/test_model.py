"""A draft model proposes tokens: no answer changes, and if it equals the main model all proposals are right.

This shows that its pages hold what they should: a stale page would cause a wrong proposal.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import tiny
from tests.workers.execute.factories import make_scheduler
from tests.workers.execute.model.native.decoders import (
    NUM_PAGES,
    PAGE_SIZE,
    NativeEngine,
    make_checkpoint,
    make_request,
)
from triptych.protocol.config import ModelConfig, PipelineConfig
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.model import build, prefault
from triptych.workers.execute.model.draft.build import _scratch
from triptych.workers.execute.model.draft.model import FEW, ON_CPU, DraftModel
from triptych.workers.execute.scheduling.proposals import FindCosts
from triptych.workers.execute.scheduling.scheduler import Scheduler
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.step import StepInputs

LENGTHS = (1, 7, 16, 45, 90)
MAX_TOKENS = 24


@pytest.fixture(scope="module", name="folder")
def fixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module", name="twins")
def fixture_twins(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> NativeEngine:
    """A model that is its own draft model."""
    checkpoint = make_checkpoint("qwen3", folder / "qwen3")
    return make_drafting_engine(checkpoint, checkpoint, tmp_path_factory.mktemp("twins"), host_pages=16)


@pytest.fixture(scope="module", name="unrelated")
def fixture_unrelated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> NativeEngine:
    """A draft model unrelated to the main model."""
    checkpoint, other = make_checkpoint("qwen3", folder / "one"), make_checkpoint("llama", folder / "other")
    return make_drafting_engine(checkpoint, other, tmp_path_factory.mktemp("unrelated"))


def make_drafting_engine(checkpoint: Path, draft: Path, run_dir: Path, **options: Any) -> NativeEngine:
    engine = NativeEngine(checkpoint, run_dir, draft=draft, **options)
    proposer = engine.runner.proposer
    assert isinstance(proposer, DraftModel)
    engine.warm_up_draft()
    assert all(costs.token > 0 for costs in proposer.costs)
    proposer.costs = DraftModel.costs  # as if it were much smaller
    return engine


@pytest.mark.parametrize(("max_rows", "tokens", "starts"), [
    (1, [0.1], [0.05]),
    (2, [0.1, 0.2], [0.05, 0.1]),
    (4, [0.1, 0.2, 0.25, 0.3], [0.05, 0.1, 0.15, 0.2]),
])  # fmt: skip
def test_costs_of_guesses_are_measured_for_one_sequence_for_two_and_for_the_most(
    max_rows: int, tokens: list[float], starts: list[float]
) -> None:
    """In steps of a model that takes 1 s for each sequence."""
    own_s = {1: 0.1, 2: 0.4, 4: 1.2}
    first_s = {1: 0.15, 2: 0.6, 4: 2.0}
    runner: Any = SimpleNamespace(
        decode_s=own_s.__getitem__, best_seconds_of=lambda inputs: first_s[len(inputs.sampled)]
    )
    limits = ON_CPU._replace(max_rows=max_rows)
    model = DraftModel(runner, num_pages=4, page_size=16, vocab_size=9, known_ids=9, limits=limits)
    model.measure_costs(float)
    assert [costs.token for costs in model.costs] == pytest.approx(tokens)
    assert [costs.start for costs in model.costs] == pytest.approx(starts)


def requests(**params: Any) -> list[Sequence]:
    return [make_request(index, length, MAX_TOKENS, **params) for index, length in enumerate(LENGTHS)]


def run(
    engine: NativeEngine, *sequences: Sequence, each_step: Callable[[Scheduler], None] = lambda _: None, **options: Any
) -> Scheduler:
    options = {"num_pages": NUM_PAGES, "num_speculative_tokens": 4, "prefix_cache": True, **options}
    scheduler = make_scheduler(*sequences, page_size=PAGE_SIZE, proposer=engine.runner.proposer, **options)
    running = Engine(scheduler, engine.runner)
    while running.step() is not None:
        running.check()
        each_step(scheduler)
    return scheduler


def record_steps(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the tokens of each step of the draft model from now on."""
    proposer = engine.runner.proposer
    assert isinstance(proposer, DraftModel)
    launch, lengths = proposer.runner.launch, []

    def counted(inputs: StepInputs) -> None:
        lengths.append(len(inputs.token_ids))
        launch(inputs)

    monkeypatch.setattr(proposer.runner, "launch", counted)
    return lengths


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9}], ids=str)
def test_model_as_its_own_draft_proposes_only_right_tokens(params: dict[str, Any], twins: NativeEngine) -> None:
    alone = [twins.run(request)[0] for request in requests(**params)]
    for chunk in (7, 512):
        sequences = requests(**params)
        scheduler = run(twins, *sequences, prefill_chunk=chunk)
        assert [sequence.output_tokens.tolist() for sequence in sequences] == alone
        proposals = scheduler.proposals
        assert proposals.num_proposed == proposals.num_accepted > 30


def test_unrelated_draft_model_changes_no_answer(unrelated: NativeEngine) -> None:
    alone = [unrelated.run(request)[0] for request in requests()]
    sequences = requests()
    proposals = run(unrelated, *sequences).proposals
    assert [sequence.output_tokens.tolist() for sequence in sequences] == alone
    assert 0 < proposals.num_proposed > proposals.num_accepted


@pytest.mark.parametrize("seed", range(8))
def test_draft_model_tracks_the_content_of_its_pages(seed: int, twins: NativeEngine) -> None:
    """Through preemptions, aborts, shared prefixes and evictions, in pages used by one sequence after another."""
    dice = random.Random(seed)
    prompts = [make_request(index, dice.choice([40, 64, 100]), 1).tokens for index in range(2)]
    sequences = []
    for index in range(12):
        sequence = make_request(index, 70, dice.choice([8, 40]), temperature=dice.choice([0.0, 0.9]))
        shared = dice.choice(prompts)[: dice.choice([16, 40, 64])]
        sequence.tokens[: len(shared)] = shared
        sequences.append(sequence)

    waiting = sequences[4:]

    def each_step(scheduler: Scheduler) -> None:
        for key in list(scheduler.live):
            if dice.random() < 0.01:
                scheduler.release(key)
        while waiting and len(scheduler.live) < 6:
            scheduler.add(waiting.pop())

    scheduler = run(
        twins, *sequences[:4], each_step=each_step, num_pages=dice.choice([20, 26, NUM_PAGES]), prefill_chunk=32,
        num_speculative_tokens=dice.choice([3, 15]), preemption=dice.choice(["swap", "recompute"]), host_pages=16,
    )  # fmt: skip
    assert scheduler.proposals.num_proposed == scheduler.proposals.num_accepted > 0


def test_siblings_propose_from_their_shared_pages(twins: NativeEngine) -> None:
    siblings = [make_request(index, 50, 20, temperature=1.0) for index in range(3)]
    for sibling in siblings:
        sibling.tokens[:50] = siblings[0].tokens[:50]
        sibling.group_key = siblings[0].key
    proposals = run(twins, *siblings).proposals
    assert proposals.num_proposed == proposals.num_accepted > 0


def test_long_prompt_is_prefilled_in_chunks(twins: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile no decode waits for all of it."""
    lengths = record_steps(twins, monkeypatch)
    long, short = make_request(0, 470, 20), make_request(1, 5, 40)
    alone = [twins.run(make_request(0, 470, 20))[0], twins.run(make_request(1, 5, 40))[0]]
    lengths.clear()
    proposals = run(twins, long, short).proposals
    assert [long.output_tokens.tolist(), short.output_tokens.tolist()] == alone
    assert ON_CPU.max_behind <= max(lengths) <= ON_CPU.max_behind + FEW
    assert proposals.num_proposed == proposals.num_accepted > 0


@pytest.mark.parametrize(("num_tokens", "is_read"), [(4, False), (30, True)])
def test_long_prompt_is_not_prefilled_for_few_tokens(
    num_tokens: int, is_read: bool, twins: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take 12 steps of the model, and save at most half of the following ones."""
    monkeypatch.setattr(twins.runner.proposer, "costs", (FindCosts(token=0.4),))
    lengths = record_steps(twins, monkeypatch)
    sequence = make_request(20, 470, num_tokens)
    run(twins, sequence)
    assert (sum(lengths) >= 470) == is_read
    assert bool(lengths) == is_read


def test_tokens_of_an_earlier_turn_are_not_prefilled_again(
    twins: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_request(7, 200, 20), make_request(8, 240, 20)
    second.tokens[:200] = first.tokens[:200]
    scheduler = run(twins, first)
    scheduler.release(first.key)
    lengths = record_steps(twins, monkeypatch)
    scheduler.add(second)
    running = Engine(scheduler, twins.runner)
    while running.step() is not None:
        pass
    assert max(lengths) <= 240 - 192 + 2  # twelve pages of sixteen were there


@pytest.mark.parametrize("returns", [False, True])
def test_reused_pages_are_not_mistaken_for_earlier_ones(returns: bool, twins: NativeEngine) -> None:
    proposer = twins.runner.proposer
    assert isinstance(proposer, DraftModel)
    sequence, other = make_request(0, 90, 20), make_request(1, 90, 20)
    outputs = twins.run(make_request(0, 90, 20))[0]
    sequence.block_table = list(range(30, 36))
    proposer.begin([(sequence, 4)])
    assert proposer.propose(sequence, 4) == outputs[:4]
    if returns:  # to its pages, used by another sequence meanwhile
        other.block_table = sequence.block_table
        proposer.begin([(other, 4)])
    else:
        sequence.block_table = list(range(40, 46))
    proposer.begin([(sequence, 4)])
    assert proposer.propose(sequence, 4) == outputs[:4]


def test_pages_of_both_models_are_brought_into_memory(twins: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    populated: list[int] = []

    def populate(address: int, num_bytes: int) -> bool:
        populated.append(num_bytes)
        return True

    monkeypatch.setattr(prefault, "populate", populate)
    draft = twins.runner.proposer
    assert isinstance(draft, DraftModel)
    while twins.runner.prepare(0.0):
        pass
    pools = [pool for runner in (twins.runner, draft.runner) for pool in runner._mover._device]
    assert sum(populated) == sum(pool.nbytes for pool in pools)


def test_failing_draft_model_is_not_used_again(
    unrelated: NativeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone = [unrelated.run(request)[0] for request in requests()]
    proposer = unrelated.runner.proposer
    assert isinstance(proposer, DraftModel)
    monkeypatch.setattr(proposer, "_is_sound", True)  # again after this test

    def fail(inputs: StepInputs) -> None:
        raise MemoryError("no memory for a step")

    monkeypatch.setattr(proposer.runner, "launch", fail)
    sequences = requests()
    with caplog.at_level(logging.ERROR):
        proposals = run(unrelated, *sequences).proposals
    assert [sequence.output_tokens.tolist() for sequence in sequences] == alone
    assert proposals.num_proposed == 0
    assert caplog.text.count("the draft model failed; it proposes no tokens until the next restart") == 1


@pytest.mark.parametrize("vocab_size", [tiny.VOCAB_SIZE - 10, tiny.VOCAB_SIZE + 40])
def test_different_padding_of_the_vocabulary_is_harmless(vocab_size: int, folder: Path, tmp_path: Path) -> None:
    """Models pad the vocabulary of one tokenizer to different sizes."""
    checkpoint = make_checkpoint("llama", tmp_path / "model")
    draft = make_checkpoint("qwen3", tmp_path / "draft", vocab_size=vocab_size)
    engine = make_drafting_engine(checkpoint, draft, tmp_path)
    alone = [engine.run(request, num_speculative_tokens=0)[0] for request in requests()]
    sequences = requests()
    assert any(token >= vocab_size for sequence in sequences for token in sequence.tokens) == (vocab_size < 272)
    run(engine, *sequences)
    assert [sequence.output_tokens.tolist() for sequence in sequences] == alone
    assert engine.runner.proposer is not None


def test_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "model")
    draft = make_checkpoint("llama", tmp_path / "draft")
    text = (draft / "tokenizer.json").read_text()
    (draft / "tokenizer.json").write_text(text.replace('"Ł": 256', '"Ł": 257').replace('"ł": 257', '"ł": 256'))
    assert (draft / "tokenizer.json").read_text() != text
    (run_dir := tmp_path / "run").mkdir()
    with pytest.raises(
        ConfigError, match=r"^the draft model: 2 of 256 tokens have another id than in the main model"
    ) as error:
        NativeEngine(checkpoint, run_dir, draft=draft)
    assert error.value.param == "draft_model"
    assert not list(run_dir.glob("draft*"))


def test_draft_model_that_only_transformers_can_run_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "model")
    draft = tiny.make_tiny_model("bitnet", tmp_path / "draft", **tiny.LLAMA_LIKE)
    with pytest.raises(ConfigError, match=r"^the draft model: .*cannot run on the native kernels"):
        NativeEngine(checkpoint, tmp_path, draft=draft)


@pytest.mark.parametrize(
    ("device", "num_ranks", "where"),
    [(torch.device("xpu", 1), 1, "xpu:1"), (torch.device("cuda"), 2, "tensor_parallel_size 2")],
    ids=["device", "ranks"],
)
def test_draft_model_is_refused_where_it_cannot_run_before_anything_is_loaded(
    device: torch.device, num_ranks: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a start, and by the trial before a restart."""
    monkeypatch.setattr(build, "take_device", lambda _: device)
    monkeypatch.setattr(build, "load_adapters", lambda *_: ())
    monkeypatch.setattr(build, "family_of", lambda _: "")
    model = ModelConfig(model=str(tmp_path), draft_model="/small", tensor_parallel_size=num_ranks)
    config = PipelineConfig(model=model)
    parts: Any = (config.model, config.cache, config.scheduler)
    folders: Any = {"draft_folder": tmp_path, "run_dir": tmp_path}
    starts: list[Callable[[], object]] = [
        lambda: build.build_runner(*parts, model_dir="/none", **folders),
        lambda: build.rehearse(config, folder=tmp_path, **folders),
    ]
    for start in starts:
        with pytest.raises(ConfigError, match=f"^draft_model is '/small', and on {where} there is none") as error:
            start()
        assert error.value.param == "draft_model"


def test_starts_that_are_killed_do_not_fill_the_run_directory(tmp_path: Path) -> None:
    """It is in memory, and a large tokenizer takes tens of megabytes."""
    lives = [_scratch(tmp_path) for _ in range(3)]
    for life in lives:
        (life.__enter__() / "tokenizer.json").touch()
    lives[-1].__exit__(None, None, None)  # the others were killed
    assert list(tmp_path.iterdir()) == []


def test_more_sequences_than_fit_in_a_step_take_turns() -> None:
    """A step has four sequences, or sixteen tokens of any number of them."""
    runner: Any = HashRunner(97, num_pages=64, page_size=4)
    limits = ON_CPU._replace(max_chunks=4, max_short=16)
    draft = DraftModel(runner, num_pages=48, page_size=4, vocab_size=97, known_ids=97, limits=limits)
    sequences = [make_request(index, 7, 20, vocab_size=97) for index in range(8)]
    for index, sequence in enumerate(sequences):
        sequence.block_table = [1 + 2 * index, 2 + 2 * index]
    proposed = []
    for _ in range(3):
        draft.begin([(sequence, 1) for sequence in sequences])
        proposed.append([draft.propose(sequence, 1) is not None for sequence in sequences])
    assert proposed == [[True] * 4 + [False] * 4, [False] * 4 + [True] * 4, [True] * 8]
