"""Steps on the compiled decoder computed in the background: the same bits, whichever thread computes and when."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.waiting import eventually
from tests.workers.execute.factories import make_scheduler
from tests.workers.execute.model.native.decoders import (
    EVERY_STEP,
    PAGE_SIZE,
    make_checkpoint,
    make_decoder,
    make_inputs,
    make_request,
)
from triptych.workers.execute.engine import Engine, StepOutputs
from triptych.workers.execute.grammar.masks import PendingMasks
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.native.decoder import NativeDecoder, NativeOutputs
from triptych.workers.execute.model.native.runner import NativeRunner
from triptych.workers.execute.model.step_runner import trash_prefill
from triptych.workers.execute.model.threads import THRESHOLDS, Thresholds
from triptych.workers.execute.sampling.sampler import Sampler
from triptych.workers.execute.scheduling.sequence import Key, Sequence
from triptych.workers.execute.step import StepInputs, StepResult

NUM_PAGES = 64
THREADS = (1, 2, 4)


@pytest.fixture(scope="module", name="checkpoint")
def fixture_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@cache
def decoder_of(checkpoint: Path, num_threads: int, *, overlaps: bool = True) -> NativeDecoder:
    return make_decoder(
        checkpoint, available_levels()[0], Format.FLOAT32,
        num_pages=NUM_PAGES, num_threads=num_threads, overlaps=overlaps, thresholds=EVERY_STEP,
    )  # fmt: skip


class Texts(dict[Key, list[int]]):
    """The answers of an engine, how often two steps were in flight, and how many steps moved pages."""

    num_overlapped = 0
    num_moves = 0

    def take(self, step: StepOutputs, num_behind: int) -> None:
        self.num_overlapped += num_behind
        self.num_moves += bool(step.plan.moves)
        for key, token in step.progress.by_key().items():
            self.setdefault(key, []).append(token)


def run(runner: NativeRunner, *sequences: Sequence, depth: int = 1, **options: Any) -> Texts:
    scheduler = make_scheduler(*sequences, num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_model_len=256, **options)
    engine, texts = Engine(scheduler, runner, depth=depth), Texts()
    while (step := engine.step()) is not None:
        texts.take(step, engine.num_in_flight)
        for key in [*step.progress.finished, *step.progress.failed]:
            engine.release(key)
    return texts


def make_runner(decoder: NativeDecoder, sampler: Sampler | None = None) -> NativeRunner:
    return NativeRunner(decoder, sampler or Sampler(()), prefill_tokens=64, decode_rows=8)


KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}] * 5,
    "drawn": [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 0.7, "min_p": 0.1}],
    "both": [{}, {"temperature": 1.0}, {}, {"temperature": 1.5, "top_k": 4}],
    "with logprobs": [{"logprobs": 2}, {}, {"temperature": 1.0, "logprobs": 0}],
    "with bias and least length": [{"logit_bias": {5: 4.0}}, {"min_tokens": 9, "stop_token_ids": (5, 6, 7)}, {}],
    "with prompt logprobs": [{"prompt_logprobs": 1}, {}],
}


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("kind", KINDS)
def test_overlapped_steps_give_the_tokens_of_serial_ones(kind: str, num_threads: int, checkpoint: Path) -> None:
    def requests() -> list[Sequence]:
        return [make_request(i, 3 + 11 * i, 8 + 5 * i, **params) for i, params in enumerate(KINDS[kind])]

    serial = run(make_runner(decoder_of(checkpoint, 1, overlaps=False)), *requests(), depth=0, prefill_chunk=16)
    overlapped = run(make_runner(decoder_of(checkpoint, num_threads)), *requests(), prefill_chunk=16)
    assert overlapped == serial
    assert serial.num_overlapped == 0
    assert overlapped.num_overlapped > 8


@pytest.mark.parametrize(
    ("thresholds", "overlaps"),
    [(EVERY_STEP, True), (THRESHOLDS, False), (Thresholds(thread=0, team=0, ahead=1), False)],
    ids=["all", "too small", "too long"],
)
def test_short_steps_are_not_overlapped(thresholds: Thresholds, overlaps: bool, checkpoint: Path) -> None:
    decoder = make_decoder(
        checkpoint, available_levels()[0], Format.FLOAT32,
        num_pages=NUM_PAGES, num_threads=2, overlaps=True, thresholds=thresholds,
    )  # fmt: skip
    assert (run(make_runner(decoder), make_request(0, 9, 16)).num_overlapped > 0) is overlaps


def test_step_shows_its_progress_while_it_is_computed(tmp_path: Path) -> None:
    """Not only at its end, as whoever looks for hangs would have to wait many times as long as the longest prompt."""
    deep = make_checkpoint("llama", tmp_path, num_hidden_layers=20, hidden_size=256, intermediate_size=512)
    runner = make_runner(make_decoder(deep, available_levels()[0], Format.FLOAT32, num_pages=NUM_PAGES, num_threads=1))
    word = np.zeros(1, np.int64)
    assert runner.show_progress(word) == 20
    prompt = trash_prefill(1024, max_len=256)

    def shows_progress() -> bool:
        seen, before = set(), time.monotonic_ns()
        with ThreadPoolExecutor(1) as threads:
            step = threads.submit(runner.seconds_of, prompt)
            while not step.done():
                seen.add(int(word[0]))
        return len([at for at in seen if at > before]) > 2

    eventually(shows_progress)


def test_sequences_that_need_their_tokens_are_not_planned_ahead(checkpoint: Path) -> None:
    runner = make_runner(decoder_of(checkpoint, 2))
    texts = [
        run(runner, make_request(0, 9, 16, repetition_penalty=1.8), make_request(1, 9, 6), depth=depth)
        for depth in (0, 1)
    ]
    assert texts[0] == texts[1]
    assert texts[1].num_overlapped == 0


def test_pages_moved_in_a_step_planned_ahead_are_moved_after_the_current_step(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If a prompt continues in the middle of another sequence's page, the page is copied first."""
    serial, ahead = (copy_in_the_middle(checkpoint, depth) for depth in (0, 1))
    assert serial.num_moves == ahead.num_moves == 1
    assert serial == ahead
    assert ahead.num_overlapped > 8
    assert not caplog.records  # no step raised or ran again


def copy_in_the_middle(checkpoint: Path, depth: int) -> Texts:
    first, second = make_request(0, 40, 60), make_request(1, 44, 30)
    scheduler = make_scheduler(first, num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_model_len=256, prefix_cache=True)
    engine, texts = Engine(scheduler, make_runner(decoder_of(checkpoint, 2)), depth=depth), Texts()
    while (step := engine.step()) is not None:
        texts.take(step, engine.num_in_flight)
        if len(texts.get(first.key, ())) == 14 and second.key not in scheduler.live:
            second.tokens[:44] = first.tokens[:44]
            engine.add(second)
    return texts


def test_pages_swapped_out_by_a_step_planned_ahead_fail_no_sequence(checkpoint: Path) -> None:
    runner = NativeRunner(decoder_of(checkpoint, 2), Sampler(()), prefill_tokens=64, decode_rows=8, num_host_pages=16)
    scheduler = make_scheduler(num_pages=12, page_size=PAGE_SIZE, max_model_len=192, prefix_cache=True, host_pages=16)
    engine, texts = Engine(scheduler, runner, depth=1), Texts()
    for index in range(3):
        engine.add(make_request(index, 40, 60))
        while (step := engine.step()) is not None:
            texts.take(step, engine.num_in_flight)
            assert not step.progress.failed
            for key in step.progress.finished:
                engine.release(key)
    assert texts.num_moves > 0
    assert [len(tokens) for tokens in texts.values()] == [60] * 3


@pytest.mark.parametrize("num_threads", THREADS)
def test_thread_that_joins_a_step_late_changes_no_bit(num_threads: int, checkpoint: Path) -> None:
    """The caller arrives at any moment of a step, before, during and after it, with two steps in flight."""
    rng = random.Random(num_threads)
    steps = [_random_step(rng) for _ in range(12)]
    alone = decoder_of(checkpoint, 1, overlaps=False)
    expected = [alone.run(step).logits.copy() for step in steps]
    decoder, under_way = decoder_of(checkpoint, num_threads), [0]
    decoder.submit(steps[0])
    for _ in range(600):
        following = rng.randrange(len(steps))
        if rng.random() < 0.7:
            decoder.submit(steps[following])
            under_way.append(following)
        _be_busy(rng.random() * rng.choice([0, 2e-4, 1e-3]))
        assert np.array_equal(decoder.wait().logits, expected[under_way.pop(0)])
        if not under_way:
            decoder.submit(steps[following])
            under_way.append(following)
    decoder.wait()


@pytest.mark.parametrize("format_", [Format.BFLOAT16, Format.INT8])
def test_rows_of_a_long_prompt_are_divided_among_threads_without_changing_a_bit(
    format_: Format, checkpoint: Path
) -> None:
    """Two threads have rows of their own. Of four, two divide the columns of the same rows."""
    prompt = make_inputs([(np.arange(450, dtype=np.int32) % 57 + 3, 0, 450)], num_pages=NUM_PAGES)
    options: dict[str, Any] = {"num_pages": NUM_PAGES, "thresholds": EVERY_STEP, "overlaps": True}
    expected, *others = (
        make_decoder(checkpoint, available_levels()[0], format_, num_threads=num, **options).run(prompt).logits
        for num in THREADS
    )
    assert np.isfinite(expected).all()
    for logits in others:
        assert np.array_equal(logits, expected)


def _random_step(rng: random.Random) -> StepInputs:
    lengths = [rng.choice([1, 3, 30, 60]) for _ in range(rng.randint(1, 6))]
    prompts = [(np.array(rng.choices(range(3, 60), k=length), np.int32), 0, length) for length in lengths]
    return make_inputs(prompts, num_pages=NUM_PAGES)


def _be_busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_decoder_can_be_freed_with_a_step_in_flight(checkpoint: Path) -> None:
    for num_threads in THREADS:
        decoder = decoder_of.__wrapped__(checkpoint, num_threads)
        step = _random_step(random.Random(0))
        decoder.submit(step)
        decoder.submit(step)
        del decoder


class _NotANumber(NativeDecoder):
    """In the fifth step, with another one in flight, the logits of row 1 are NaN."""

    num_waits = 0

    def wait(self) -> NativeOutputs:
        outputs = super().wait()
        self.num_waits += 1
        if self.num_waits == 5:
            assert self._submitted
            outputs.logits[1] = outputs.greatest[1] = np.nan
        return outputs


def test_nan_row_fails_alone(checkpoint: Path) -> None:
    decoder = decoder_of.__wrapped__(checkpoint, 2)
    expected = run(make_runner(decoder), *(make_request(i, 9, 12) for i in range(3)))
    decoder.__class__ = _NotANumber
    texts = run(make_runner(decoder), *(make_request(i, 9, 12) for i in range(3)))
    cut = texts.pop((1, 0))
    assert 0 < len(cut) < 12
    assert cut == expected.pop((1, 0))[: len(cut)]
    assert texts == expected


class _Raises(Sampler):
    """Raises when it gets the sequence with index 1 and more than three output tokens."""

    def sample(
        self, logits: torch.Tensor, sequences: Any, masks: PendingMasks | None = None, **lengths: Any
    ) -> StepResult:
        if any(sequence.key[0] == 1 and sequence.num_output_tokens > 3 for sequence in sequences):
            raise RuntimeError("no sampling today")
        return super().sample(logits, sequences, masks, **lengths)


def test_sampler_that_raises_fails_only_its_own_request(checkpoint: Path) -> None:
    def requests() -> list[Sequence]:
        return [make_request(i, 9, 12, temperature=1.0) for i in range(4)]

    decoder = decoder_of(checkpoint, 2)
    expected = run(make_runner(decoder), *requests())
    texts = run(make_runner(decoder, _Raises(())), *requests())
    cut = texts.pop((1, 0))
    assert 0 < len(cut) < 12
    assert cut == expected.pop((1, 0))[: len(cut)]
    assert texts == expected
