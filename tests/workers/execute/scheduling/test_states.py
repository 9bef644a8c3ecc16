"""Sequences of a recurrent model: each that runs has a slot for its state, and goes on from no other one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.execute.factories import (
    expected_output,
    make_beams,
    make_engine,
    make_group,
    make_scheduler,
    make_sequence,
    make_sequences,
    recover,
    run,
)
from tests.workers.execute.recurrent_hash import RecurrentHashRunner
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.step import StepInputs


def slots(*sequences: Sequence) -> list[int]:
    return [sequence.state_slot for sequence in sequences]


def test_who_runs_has_the_lowest_free_slot() -> None:
    sequences = make_sequences(3, num_tokens=2)
    scheduler = make_scheduler(*sequences, keeps_states=True)
    scheduler.plan()
    assert slots(*sequences) == [1, 2, 3]
    scheduler.release(sequences[1].key)
    late = make_sequence(9)
    scheduler.add(late)
    scheduler.plan()
    assert slots(*sequences, late) == [1, 0, 3, 2]


def test_a_model_without_states_has_no_slots() -> None:
    sequence = make_sequence()
    make_scheduler(sequence).plan()
    assert slots(sequence) == [0]


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "round_robin"])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_preempted_sequences_say_what_they_would_have_said(policy: str, chunk: int) -> None:
    sequences = make_sequences(8, num_tokens=9, max_tokens=12)
    engine = make_engine(*sequences[:6], keeps_states=True, num_pages=9, policy=policy, prefill_chunk=chunk)
    outputs = run(engine)
    assert sum(s.num_preemptions for s in sequences) > 0
    assert outputs == {s.key: expected_output(s) for s in sequences[:6]}


def test_equal_prompts_share_nothing() -> None:
    sequences = [make_sequence(index, num_tokens=12, max_tokens=3, speaker=1) for index in range(3)]
    engine = make_engine(*sequences, keeps_states=True, prefix_cache=True)
    assert run(engine) == {s.key: expected_output(s) for s in sequences}
    assert sum(s.num_cached_tokens for s in sequences) == 0


def test_samples_of_one_prompt_compute_it_each_for_himself() -> None:
    sequences = make_group(0, 3, num_tokens=9, max_tokens=5, temperature=1.0)
    engine = make_engine(*sequences, keeps_states=True)
    assert run(engine) == {s.key: expected_output(s) for s in sequences}


def test_a_recovered_sequence_computes_all_it_had_said() -> None:
    sequence = recover(make_sequence(0, num_tokens=5, max_tokens=9), 4)
    engine = make_engine(sequence, keeps_states=True)
    assert run(engine) == {sequence.key: expected_output(sequence)}


def test_beams_are_no_sequences_of_such_a_model() -> None:
    with pytest.raises(AssertionError, match="states cannot be forked"):
        make_scheduler(*make_beams(0, 2), keeps_states=True)


class FailsLate(RecurrentHashRunner):
    """A step with the token 96 fails, and only when all states were written."""

    def launch(self, inputs: StepInputs) -> None:
        super().launch(inputs)
        if 96 in inputs.token_ids.tolist():
            self._results.pop()
            raise ValueError("no 96")


@pytest.mark.parametrize("chunk", [2, 64])
def test_a_step_that_is_run_again_goes_on_from_the_states_before_it(chunk: int) -> None:
    sequences = make_sequences(4, num_tokens=6, max_tokens=12)
    sequences[2].tokens[4] = 96
    options: dict[str, Any] = {"keeps_states": True, "prefill_chunk": chunk}
    outputs = run(make_engine(*sequences, runner=FailsLate, **options))
    said = {s.key: expected_output(s) for s in sequences}
    spoken = [s for s in sequences if s is not sequences[2] and 96 not in said[s.key]]
    assert len(spoken) >= 2
    assert sequences[2].finish_reason == "error"
    assert all(outputs[s.key] == said[s.key] for s in spoken)
