"""A failure affects only its own sequence."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest

from tests.workers.execute.factories import expected_output, make_engine, make_sequence, make_sequences, run
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.step import StepInputs, StepResult

BAD = 1  # the sequence that fails
BAD_TOKEN = int(make_sequence(BAD).tokens[4])


class RaisesAtLaunch(HashRunner):
    def launch(self, inputs: StepInputs) -> None:
        super().launch(inputs)
        if BAD_TOKEN in inputs.token_ids[inputs.positions == 4]:
            super().collect()
            raise ValueError("bad luck")


class RaisesAtCollect(HashRunner):
    bad = False

    def launch(self, inputs: StepInputs) -> None:
        super().launch(inputs)
        self.bad = any(sequence.key[0] == BAD for sequence in inputs.sampled)

    def collect(self) -> StepResult:
        result = super().collect()
        if self.bad:
            raise ValueError("bad luck")
        return result


class FailsARow(HashRunner):
    def launch(self, inputs: StepInputs) -> None:
        super().launch(inputs)
        failed = {row: "bad luck" for row, sequence in enumerate(inputs.sampled) if sequence.key[0] == BAD}
        self._results[-1] = dataclasses.replace(self._results[-1], failed=failed)


class FailsEveryRow(HashRunner):
    """Except for the first step."""

    has_begun = False

    def launch(self, inputs: StepInputs) -> None:
        super().launch(inputs)
        if self.has_begun:
            failed = dict.fromkeys(range(len(inputs.sampled)), "not a number")
            self._results[-1] = dataclasses.replace(self._results[-1], failed=failed)
        self.has_begun = True


class AlwaysRaises(HashRunner):
    def launch(self, inputs: StepInputs) -> None:
        raise ValueError("bad luck")


@pytest.mark.parametrize("runner", [RaisesAtLaunch, RaisesAtCollect, FailsARow])
def test_only_the_failing_sequence_fails(runner: type[HashRunner]) -> None:
    sequences = make_sequences(4)
    outputs = run(make_engine(*sequences, runner=runner))
    assert sequences[BAD].finish_reason == "error"
    assert outputs.pop((BAD, 0)) == []
    assert outputs == {s.key: expected_output(s) for s in sequences if s.key[0] != BAD}


@pytest.mark.parametrize("runner", [RaisesAtLaunch, RaisesAtCollect, FailsARow])
def test_failure_contains_the_reason(runner: type[HashRunner]) -> None:
    step = make_engine(*make_sequences(3), runner=runner).step()
    assert step is not None
    assert list(step.progress.failed) == [(BAD, 0)]
    assert "bad luck" in step.progress.failed[BAD, 0]


def test_sequence_whose_chunk_fails_before_it_samples_fails_alone() -> None:
    sequences = [make_sequence(index, num_tokens=20) for index in range(3)]
    engine = make_engine(*sequences, runner=RaisesAtLaunch, max_num_batched_tokens=24)
    step = engine.step()
    assert step is not None
    assert list(step.progress.failed) == [(BAD, 0)]
    assert set(run(engine)) == {(0, 0), (2, 0)}


def test_one_bad_sequence_of_many_is_found_by_halving() -> None:
    class Counts(RaisesAtLaunch):
        num_launches = 0

        def launch(self, inputs: StepInputs) -> None:
            type(self).num_launches += 1
            super().launch(inputs)

    sequences = make_sequences(64)
    engine = make_engine(*sequences, runner=Counts, max_num_seqs=64, num_pages=256, max_num_batched_tokens=64 * 8)
    step = engine.step()
    assert step is not None
    assert list(step.progress.failed) == [(BAD, 0)]
    assert len(step.progress.token_ids) == 63
    assert Counts.num_launches == 1 + 2 * 6


class Activations:
    """What a step holds while it computes."""


class RunsOutOfMemory(HashRunner):
    """Records at each launch how many of the failed steps still hold their activations."""

    def __init__(self, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        self.held: list[weakref.ref[Activations]] = []
        self.num_alive: list[int] = []

    def launch(self, inputs: StepInputs) -> None:
        self.num_alive.append(sum(held() is not None for held in self.held))
        try:
            self.compute()
        except MemoryError as error:
            raise ValueError("a layer failed") from error

    def compute(self) -> None:
        activations = Activations()
        self.held.append(weakref.ref(activations))
        raise MemoryError("out of memory")


def test_failed_step_holds_no_memory_while_its_halves_run() -> None:
    engine = make_engine(*make_sequences(4), runner=RunsOutOfMemory, max_num_batched_tokens=64)
    engine.step()
    runner = engine._runner._runner
    assert isinstance(runner, RunsOutOfMemory)
    assert runner.num_alive == [0] * 7


def test_error_that_is_fatal_to_the_device_is_not_caught() -> None:
    class Broken(AlwaysRaises):
        def is_fatal(self, error: Exception) -> bool:
            return isinstance(error, ValueError)

    with pytest.raises(ValueError, match="bad luck"):
        make_engine(*make_sequences(3), runner=Broken).step()


def test_when_every_sequence_fails_the_next_request_is_still_served() -> None:
    engine = make_engine(*make_sequences(3), runner=AlwaysRaises)
    step = engine.step()
    assert step is not None
    assert set(step.progress.failed) == {(0, 0), (1, 0), (2, 0)}
    assert not engine.has_work


def test_failed_sequence_holds_its_pages_until_it_is_released() -> None:
    engine = make_engine(make_sequence(BAD), runner=AlwaysRaises)
    engine.step()
    assert (engine.stats.num_limbo_pages, engine.stats.num_held_pages) == (2, 0)
    engine.release((BAD, 0))
    assert engine.stats.num_free_pages == engine.stats.num_pages


def test_sequence_released_while_its_failed_step_runs_is_not_reported() -> None:
    engine = make_engine(*make_sequences(3), runner=RaisesAtLaunch, max_num_batched_tokens=64)
    plan = engine.plan()
    assert plan is not None
    engine.launch(plan)
    engine.release((0, 0))
    step = engine.collect()
    assert step.progress.keys == [(2, 0)]
    assert set(step.progress.failed) == {(BAD, 0)}


def test_pages_shared_by_sequences_that_all_fail_are_no_longer_shared() -> None:
    """Their keys and values may be the cause: other sequences that found them would fail too."""
    engine = make_engine(make_sequence(num_tokens=13), runner=FailsEveryRow, prefix_cache=True, prefill_chunk=32)
    engine.step()
    engine.add(make_sequence(1, num_tokens=14, speaker=0))
    step = engine.step()
    assert step is not None
    assert set(step.progress.failed) == {(0, 0), (1, 0)}
    engine.add(make_sequence(2, num_tokens=15, speaker=0))
    step = engine.step()
    assert step is not None
    assert [start.num_cached_tokens for start in step.plan.starts] == [0]
