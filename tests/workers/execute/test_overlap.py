"""Steps planned and launched before the tokens of the last one are known give the same tokens as serial ones."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest

from tests.workers.execute.factories import (
    VOCAB_SIZE,
    expected_output,
    make_engine,
    make_group,
    make_scheduler,
    make_sequence,
    make_sequences,
    recover,
    run,
)
from tests.workers.execute.test_isolation import BAD, AlwaysRaises, FailsARow, RaisesAtCollect, RaisesAtLaunch
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.scheduling.sequence import Key, SequenceState
from triptych.workers.execute.step import StepInputs, StepResult

GARBAGE = -1  # where a token should be


def num_in_flight(engine: Engine) -> int:
    return len(engine._in_flight)


class CountsCarried(HashRunner):
    """Records how many tokens of each step come from the step before."""

    counts: list[int]

    def launch(self, inputs: StepInputs) -> None:
        count = 0 if inputs.carried is None else int((inputs.carried >= 0).sum())
        type(self).counts.append(count)
        super().launch(inputs)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_pages": 14}, {"prefix_cache": True}, {"prefill_chunk": 3}, {"policy": "prefill_first"}],
    ids=str,
)
def test_overlapped_steps_give_the_tokens_of_serial_ones(options: dict[str, Any]) -> None:
    texts = []
    for depth in (0, 1):
        sequences = [make_sequence(i, num_tokens=3 + 4 * i, max_tokens=9, temperature=i % 2) for i in range(6)]
        outputs = run(make_engine(*sequences, depth=depth, **options))
        texts.append([outputs[s.key] for s in sequences])
        assert texts[-1] == [expected_output(s) for s in sequences]
    assert texts[0] == texts[1]


def test_tokens_are_carried_on_the_device() -> None:
    CountsCarried.counts = []
    run(make_engine(*make_sequences(3, num_tokens=2, max_tokens=10), depth=1, runner=CountsCarried))
    assert CountsCarried.counts.count(3) >= 7


def test_time_of_a_step_begins_when_the_previous_one_ends() -> None:
    """Two steps are in flight, one of them running: their times do not overlap."""
    ticks = itertools.count()
    engine = Engine(
        make_scheduler(make_sequence(max_tokens=8)),
        HashRunner(VOCAB_SIZE, num_pages=64, page_size=4),
        clock=lambda: next(ticks),
        depth=1,
    )
    steps = [step for _ in range(8) if (step := engine.step()) is not None]
    assert all(later.began_at >= earlier.collected_at for earlier, later in itertools.pairwise(steps))
    assert any(step.launched_at < step.began_at for step in steps)
    assert [record.elapsed_ns for record in engine.history.last(8)] == [s.collected_at - s.began_at for s in steps]


def test_two_steps_are_in_flight_while_one_is_collected() -> None:
    engine = make_engine(make_sequence(max_tokens=6), depth=1)
    counts = []
    while engine.has_work:
        engine.step()
        counts.append(num_in_flight(engine))
    assert counts == [1, 1, 1, 1, 1, 0]


def test_stop_token_is_noticed_one_step_late_and_later_tokens_are_dropped() -> None:
    stop = expected_output(make_sequence(max_tokens=20))[6]
    sequence = make_sequence(max_tokens=20, stop_ids=frozenset({stop}))
    other = make_sequence(1, max_tokens=20)
    engine = make_engine(sequence, other, depth=1)
    outputs = run(engine)
    assert outputs[sequence.key] == expected_output(sequence)
    assert outputs[other.key] == expected_output(other)
    assert sequence.finish_reason == "stop"
    engine.release(sequence.key)
    engine.release(other.key)
    assert engine.stats.num_free_pages == engine.stats.num_pages


def test_sequence_that_ends_by_its_length_is_not_computed_once_more() -> None:
    CountsCarried.counts = []
    run(make_engine(make_sequence(max_tokens=4), depth=1, runner=CountsCarried))
    assert CountsCarried.counts == [0, 1, 1, 1]


def test_sequence_whose_last_token_is_in_flight_has_left_its_row() -> None:
    sequence = make_sequence(max_tokens=2)
    engine = make_engine(sequence, make_sequence(1), depth=1, max_num_seqs=1)
    engine.step()
    engine.step()
    assert run(engine)[(1, 0)] == expected_output(make_sequence(1))
    assert sequence.state is SequenceState.FINISHED


@pytest.mark.parametrize("is_grammar", [False, True])
def test_sequence_that_needs_its_own_tokens_keeps_steps_serial(is_grammar: bool) -> None:
    """Penalties and grammars depend on every earlier token; while one is live, no step is planned ahead."""
    needy = make_sequence(1) if is_grammar else make_sequence(1, frequency_penalty=0.5)
    needy.grammar = object() if is_grammar else None
    engine = make_engine(make_sequence(), needy, depth=1)
    engine.step()
    assert num_in_flight(engine) == 0
    engine.release((1, 0))
    engine.step()
    assert num_in_flight(engine) == 1


def test_sequence_that_no_longer_needs_its_own_tokens_lets_steps_overlap() -> None:
    needy = make_sequence(1)
    needy.grammar = object()
    engine = make_engine(make_sequence(), needy, depth=1)
    engine.step()
    assert num_in_flight(engine) == 0
    needy.grammar = None
    engine.step()
    assert num_in_flight(engine) == 1
    assert run(engine) == {(index, 0): expected_output(make_sequence(index)) for index in range(2)}


def test_deadline_counts_the_tokens_that_were_sent() -> None:
    """Not the one in flight when it passes, which is dropped."""
    sequence = make_sequence(max_tokens=20)
    sequence.deadline_at = 12
    ticks = itertools.count()
    scheduler = make_scheduler(sequence)
    engine = Engine(scheduler, HashRunner(VOCAB_SIZE, num_pages=64, page_size=4), clock=lambda: next(ticks), depth=1)
    steps = [step for _ in range(20) if (step := engine.step()) is not None]
    num_tokens = sum(len(step.progress.token_ids) for step in steps)
    [why] = [why for step in steps for why in step.progress.expired.values()]
    assert why == f"deadline exceeded after {num_tokens} tokens"
    assert num_tokens > 1


def test_no_step_is_planned_ahead_that_could_need_another_sequence_s_pages() -> None:
    sequences = make_sequences(3, num_tokens=5, max_tokens=12)
    engine = make_engine(*sequences, num_pages=9, depth=1)
    seen = []
    while engine.has_work:
        step = engine.step()
        assert step is not None
        if step.plan.preempted:
            seen.append(step.plan.step)
        engine.check()
    assert seen
    assert [s.output_tokens.tolist() for s in sequences] == [expected_output(s) for s in sequences]


def test_abort_with_two_steps_in_flight_frees_all_pages() -> None:
    sequences = make_sequences(3, max_tokens=30)
    engine = make_engine(*sequences, depth=1)
    for _ in range(4):
        engine.step()
    for sequence in sequences:
        engine.release(sequence.key)
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.stats.num_free_pages == engine.stats.num_pages


@pytest.mark.parametrize("runner", [RaisesAtLaunch, RaisesAtCollect, FailsARow])
def test_only_the_failing_sequence_fails(runner: type[HashRunner]) -> None:
    sequences = make_sequences(4, max_tokens=12)
    outputs = run(make_engine(*sequences, runner=runner, depth=1))
    assert sequences[BAD].finish_reason == "error"
    del outputs[(BAD, 0)]
    assert outputs == {s.key: expected_output(s) for s in sequences if s.key[0] != BAD}


class FailsLate(HashRunner):
    """Collecting the step in which a given sequence decodes its third token raises."""

    fails: list[bool]

    def launch(self, inputs: StepInputs) -> None:
        super().launch(inputs)
        is_bad = [s.key[0] == BAD and s.num_tokens == s.num_prompt_tokens + 2 for s in inputs.sampled]
        self.fails = [*getattr(self, "fails", []), any(is_bad)]

    def collect(self) -> StepResult:
        result = super().collect()
        if self.fails.pop(0):
            raise ValueError("bad luck")
        return result


class FailsBehindAFailure(FailsLate):
    """And whatever is launched after it raises at once, like a device that reports an error late."""

    def launch(self, inputs: StepInputs) -> None:
        if any(getattr(self, "fails", [])):
            raise ValueError("worse luck")
        super().launch(inputs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_step_after_a_failed_one_is_run_again(temperature: float) -> None:
    sequences = make_sequences(4, max_tokens=12, temperature=temperature)
    outputs = run(make_engine(*sequences, runner=FailsLate, depth=1))
    assert sequences[BAD].finish_reason == "error"
    assert outputs.pop((BAD, 0)) == expected_output(sequences[BAD])[:2]
    assert outputs == {s.key: expected_output(s) for s in sequences if s.key[0] != BAD}


@pytest.mark.parametrize("runner", [FailsLate, FailsBehindAFailure])
def test_sequence_alone_after_a_failed_step_is_not_blamed(runner: type[HashRunner]) -> None:
    bad, other = make_sequence(BAD, max_tokens=3), make_sequence(BAD + 1, max_tokens=12)
    outputs = run(make_engine(bad, other, runner=runner, depth=1))
    assert bad.finish_reason == "error"
    assert outputs[other.key] == expected_output(other)


class SecondStepFails(HashRunner):
    """It leaves garbage in its pages, and raises when it is collected."""

    num_launched = num_collected = 0

    def launch(self, inputs: StepInputs) -> None:
        super().launch(inputs)
        self.num_launched += 1
        if self.num_launched == 2:
            self._cells.reshape(-1)[inputs.slot_mapping] = GARBAGE

    def collect(self) -> StepResult:
        result = super().collect()
        self.num_collected += 1
        if self.num_collected == 2:
            raise ValueError("bad luck")
        return result


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["no cache", "cache"])
def test_sample_copies_no_page_that_a_step_in_flight_writes(prefix_cache: bool) -> None:
    """Greedy samples are equal, so after a crash one has the token that the other is computing when it starts."""
    first, second = make_group(0, 2, num_tokens=5, max_tokens=12, temperature=0.0)
    sequences = [first, recover(second, 6), make_sequence(9)]
    run(make_engine(*sequences, depth=1, page_size=16, prefix_cache=prefix_cache, runner=SecondStepFails))
    assert [s.output_tokens.tolist() for s in sequences] == [expected_output(s) for s in sequences]


def test_when_every_sequence_fails_the_next_request_is_still_served() -> None:
    engine = make_engine(*make_sequences(3), runner=AlwaysRaises, depth=1)
    while engine.has_work:
        engine.step()
    engine._runner._runner = HashRunner(97, num_pages=64, page_size=4)
    engine.add(make_sequence(7))
    assert run(engine)[(7, 0)] == expected_output(make_sequence(7))


def test_sequence_that_ended_in_a_failed_step_is_not_expected_in_the_next_one() -> None:
    class Counts(FailsLate):
        sizes: ClassVar[list[int]] = []

        def launch(self, inputs: StepInputs) -> None:
            self.sizes.append(len(inputs.sampled))
            super().launch(inputs)

    run(make_engine(*make_sequences(4, max_tokens=12), runner=Counts, depth=1))
    assert Counts.sizes[:4] == [2, 4, 4, 4]  # the third fails, and with it the fourth
    assert Counts.sizes[4:8] == [2, 1, 1, 2]  # its halves, and those of the first half
    assert Counts.sizes[8] == 3


def test_start_that_takes_the_last_pages_preempts_no_sequence_with_a_token_in_flight() -> None:
    """An urgent request claims idle pages before the decodes, which all need a page for their next token."""
    long: dict[str, Any] = {"num_tokens": 121, "speaker": 50}
    engine = make_engine(
        make_sequence(0, max_tokens=1, **long),
        depth=1, num_pages=67, page_size=4, prefix_cache=True, max_num_seqs=8, prefill_chunk=8,
        max_num_batched_tokens=8, policy="priority", max_prefill_skip=2, safety_margin=0.0,
    )  # fmt: skip
    lengths = (8, 8, 6, 7, 5, 8, 4, 4)
    sequences = [make_sequence(1 + i, num_tokens=length, max_tokens=30) for i, length in enumerate(lengths)]
    for sequence in sequences:
        sequence.priority = 5
    coming = dict(enumerate(sequences, 28))
    coming[42] = urgent = make_sequence(20, max_tokens=5, **long)
    urgent.priority = -5
    outputs: dict[Key, list[int]] = {}
    for turn in itertools.count(1):
        if turn in coming:
            engine.add(coming.pop(turn))
        elif not coming and not engine.has_work:
            break
        step = engine.step()
        for key, token in {} if step is None else step.progress.by_key().items():
            outputs.setdefault(key, []).append(token)
        for key in [] if step is None else step.progress.finished:
            engine.release(key)
    assert engine.scheduler.roster.num_preemptions
    assert {s.key: outputs[s.key] for s in [*sequences, urgent]} == {
        s.key: expected_output(s) for s in [*sequences, urgent]
    }
