"""How long a step may take before the worker counts as hung."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.protocol.factories import accept, make_journal, make_record
from triptych.protocol.arrays import Int64
from triptych.protocol.board import Board, WorkerPage
from triptych.protocol.config import PipelineConfig
from triptych.protocol.journal.requests import RequestWriter
from triptych.workers.execute.hash_build import build_hash_runner
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.patience import FACTOR, NUM_STEPS, Patience
from triptych.workers.execute.process import Execute
from triptych.workers.execute.scheduling.plan import Chunk, Plan
from triptych.workers.process import WorkerContext

FULL_S, DECODE_S = 6.0, 0.3  # of a model with 4B parameters on two processors
PROMPT = Plan(1, (Chunk((0, 1), 0, 512, False),), num_decodes=0)
DECODES = Plan(2, (Chunk((0, 1), 600, 1, True),), num_decodes=1)


@pytest.fixture
def page(tmp_path: Path) -> WorkerPage:
    return Board(tmp_path / "board").worker("execute")


@pytest.fixture
def patience(page: WorkerPage) -> Patience:
    """That of a worker that has generated tokens for a while."""
    patience = Patience(page, full_step_s=FULL_S)
    assert patience_s(page) == FACTOR * FULL_S
    for _ in range(2 * NUM_STEPS):
        patience.observe(DECODES, DECODE_S)
    assert patience_s(page) == pytest.approx(FACTOR * DECODE_S, rel=0.1)
    return patience


def patience_s(page: WorkerPage) -> float:
    return page.patience_ns / 1e9


def test_prompt_after_many_tokens_of_answers_has_the_time_of_a_full_step(page: WorkerPage, patience: Patience) -> None:
    patience.begin(PROMPT)
    assert patience_s(page) == FACTOR * FULL_S
    patience.observe(PROMPT, 2 * FULL_S)  # its context was long
    patience.begin(PROMPT)
    assert patience_s(page) == FACTOR * 2 * FULL_S


def test_prompt_whose_layers_show_progress_has_the_time_of_a_layer(page: WorkerPage) -> None:
    patience = Patience(page, full_step_s=FULL_S, num_parts=36)
    for _ in range(2 * NUM_STEPS):
        patience.observe(DECODES, DECODE_S)
    patience.begin(PROMPT)
    assert patience_s(page) == pytest.approx(FACTOR * DECODE_S, rel=0.1)  # after its last layer, a step samples
    patience.observe(PROMPT, 36.0)
    for _ in range(2 * NUM_STEPS):
        patience.observe(DECODES, DECODE_S)
    patience.begin(PROMPT)
    assert patience_s(page) == FACTOR * 1.0
    patience.begin(PROMPT, scores=True)
    assert patience_s(page) == FACTOR * 36.0


def test_patience_is_not_lowered_while_a_prompt_is_computed(page: WorkerPage, patience: Patience) -> None:
    patience.begin(PROMPT)
    for _ in range(NUM_STEPS):
        patience.observe(DECODES, DECODE_S, ahead=PROMPT)
    assert patience_s(page) == FACTOR * FULL_S
    for _ in range(NUM_STEPS):
        patience.observe(DECODES, DECODE_S, ahead=DECODES)
    assert patience_s(page) < FULL_S * 2


class Shows(HashRunner):
    def __init__(self) -> None:
        super().__init__(512, num_pages=64, page_size=16)

    def show_progress(self, word: Int64) -> int:
        self.word = word
        return 4


def test_runner_shows_its_progress_on_the_board(tmp_path: Path) -> None:
    config, journal = PipelineConfig.from_options(model="hash-lm"), make_journal(tmp_path)
    _, card = build_hash_runner(config.model, config.cache, config.scheduler, run_dir=tmp_path)
    context = WorkerContext("execute", 1, tmp_path, config, Board(tmp_path / "board"), journal)
    execute = Execute(context, shows := Shows(), card, step_s=FULL_S)
    shows.word[0] = 123
    assert context.page.progress_ns == 123
    execute._links.close()


def test_execute_raises_its_patience_before_it_computes_a_prompt(tmp_path: Path) -> None:
    config, journal = PipelineConfig.from_options(model="hash-lm"), make_journal(tmp_path)
    runner, card = build_hash_runner(config.model, config.cache, config.scheduler, run_dir=tmp_path)
    context = WorkerContext("execute", 1, tmp_path, config, Board(tmp_path / "board"), journal)
    execute = Execute(context, runner, card, step_s=FULL_S)
    context.page.set_patience(0)
    writer = RequestWriter(journal)
    view = accept(writer, journal, make_record())
    writer.dispatch(view.slot, view.generation, 5_000_000)
    execute.turn()
    assert patience_s(context.page) == FACTOR * FULL_S
    execute._links.close()
