"""Tokens are proposed where checking them costs less than they are expected to gain."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.execute.factories import Told, expected_output, make_engine, make_sequence, make_sequences
from tests.workers.execute.test_speculation import run, truth
from triptych.workers.execute.scheduling.proposals import CheckCosts, FindCosts


@pytest.mark.parametrize(("step", "num_steps"), [(0.0, 8), (0.9, 8), (1.2, 25), (3.8, 60)])
def test_step_has_proposals_if_all_together_gain_more_than_it_costs(step: float, num_steps: int) -> None:
    """All are right. At first, four tokens are expected to gain 0.9 of a step, later 3.9."""
    _, answers, taken = run(make_sequence(max_tokens=30), check_costs=CheckCosts(token=0.001, step=step))
    assert answers == {(0, 0): expected_output(make_sequence(max_tokens=30))}
    assert taken <= num_steps
    assert (taken == 1 + 6) == (step < 1)


@pytest.mark.parametrize(("start_cost", "num_checked"), [(0.1, 1), (0.5, 0)])
def test_step_has_proposals_if_they_gain_more_than_it_costs_to_find_any(start_cost: float, num_checked: int) -> None:
    """Four tokens are expected to gain 0.9 of a step, and checking takes 0.5."""
    proposer = Told(truth)
    proposer.costs = (FindCosts(start=start_cost),)
    costs = CheckCosts(token=0.001, step=0.5)
    sequence = make_sequence(num_tokens=1, max_tokens=12)
    engine = make_engine(sequence, proposer=proposer, num_speculative_tokens=4, page_size=64, check_costs=costs)
    engine.step()
    step = engine.step()
    assert step is not None
    assert step.plan.num_checked == num_checked


@pytest.mark.parametrize(("num_sequences", "num_proposed"), [(1, 1), (2, 0), (4, 0)])
def test_what_it_costs_to_find_proposals_depends_on_how_many_sequences_have_them(
    num_sequences: int, num_proposed: int
) -> None:
    proposer = Told(truth)
    proposer.costs = (FindCosts(token=0.1), FindCosts(token=0.6))
    sequences = make_sequences(num_sequences, num_tokens=1, max_tokens=12)
    sizes: dict[str, Any] = {"prefill_chunk": 64, "page_size": 64, "num_pages": 64}
    costs = CheckCosts(token=0.001)
    engine = make_engine(*sequences, proposer=proposer, num_speculative_tokens=1, check_costs=costs, **sizes)
    engine.step()
    step = engine.step()
    assert step is not None
    assert step.plan.num_checked == num_proposed


@pytest.mark.parametrize("is_right", [True, False])
def test_chance_of_a_new_sequence_is_learned_from_others_if_they_are_alike(is_right: bool) -> None:
    proposer = Told(truth if is_right else lambda sequence, count: [1] * count)
    proposer.chance = 0.8
    engine = make_engine(proposer=proposer, num_speculative_tokens=4, page_size=64, max_num_seqs=8)
    chances = []
    for index in range(4):
        sequence = make_sequence(index, num_tokens=1, max_tokens=60)
        engine.add(sequence)
        chances.append(sequence.chance)
        while sequence.finish_reason is None:
            engine.step()
    assert chances[0] == 0.8
    assert chances == sorted(set(chances), reverse=not is_right)
    excluded = make_sequence(9)
    excluded.chance = 0.0
    engine.add(excluded)
    assert excluded.chance == 0.0


@pytest.mark.parametrize(("cost", "most"), [(0.15, 24), (0.5, 10)])
def test_vain_proposals_that_cost_more_are_tried_less_often(cost: float, most: int) -> None:
    """They take 0.2 or 0.5 of a step, for one token at a time."""
    proposer = Told(lambda sequence, count: [1] * count)
    proposer.costs = (FindCosts(token=cost),)
    sequence = make_sequence(num_tokens=1, max_tokens=200)
    engine = make_engine(sequence, proposer=proposer, num_speculative_tokens=4, page_size=64)
    tried = []
    while (step := engine.step()) is not None:
        tried.append(step.plan.has_proposals)
    assert most / 2 <= sum(tried) <= most


@pytest.mark.parametrize(("sequence", "num_proposed"), [(0.0, 2), (0.1, 2), (0.3, 1), (0.5, 0)])
def test_sequence_has_proposals_if_they_gain_more_than_it_takes_to_find_them(
    sequence: float, num_proposed: int
) -> None:
    """In a step of two, one has a gain of 0.9 and the other of 0.3."""
    sequences = make_sequences(2, num_tokens=1, max_tokens=12)
    sequences[1].chance = 0.25
    options: dict[str, Any] = {"propose": truth, "num_speculative_tokens": 4, "page_size": 64}
    engine = make_engine(*sequences, check_costs=CheckCosts(token=0.001, sequence=sequence), **options)
    engine.step()
    step = engine.step()
    assert step is not None
    assert step.plan.num_checked == num_proposed


def test_proposals_of_one_among_many_are_not_worth_a_step_that_costs_more() -> None:
    costs = CheckCosts(token=0.001, step=0.4, max_tokens=128)
    for count in (1, 40):
        sequences = make_sequences(count, num_tokens=1, max_tokens=12)
        for sequence in sequences[1:]:
            sequence.chance = 0.0
        sizes: dict[str, Any] = {"max_num_seqs": 40, "num_pages": 64, "prefill_chunk": 64, "page_size": 64}
        engine = make_engine(*sequences, propose=truth, num_speculative_tokens=15, check_costs=costs, **sizes)
        engine.step()
        step = engine.step()
        assert step is not None
        assert step.plan.has_proposals == (count == 1)


def test_gain_is_that_of_as_many_proposals_as_have_room() -> None:
    """Of four for each of 20, at most one has a place beside them, and gains 0.5 of what the step costs more."""
    for max_tokens in (40, 100):
        costs = CheckCosts(token=0.001, step=0.6, max_tokens=max_tokens)
        sizes: dict[str, Any] = {"max_num_seqs": 20, "num_pages": 64, "prefill_chunk": 64, "page_size": 64}
        sequences = make_sequences(20, num_tokens=1, max_tokens=12)
        engine = make_engine(*sequences, propose=truth, num_speculative_tokens=4, check_costs=costs, **sizes)
        engine.step()
        step = engine.step()
        assert step is not None
        assert step.plan.has_proposals == (max_tokens == 100)


def test_wide_device_checks_proposals_of_many_in_a_step() -> None:
    sequences = make_sequences(20, num_tokens=1, max_tokens=12)
    costs = CheckCosts(token=0.001, max_tokens=64)
    sizes: dict[str, Any] = {"max_num_seqs": 20, "num_pages": 64, "prefill_chunk": 64}
    _, answers, num_steps = run(*sequences, check_costs=costs, **sizes)
    assert answers == {s.key: expected_output(s) for s in sequences}
    assert num_steps < 6


def test_decode_beside_a_prompt_gets_no_proposals_where_such_steps_cannot_have_any() -> None:
    costs = CheckCosts(beside_prompts=False)
    options: dict[str, Any] = {"propose": truth, "num_speculative_tokens": 4, "page_size": 64, "check_costs": costs}
    engine = make_engine(make_sequence(max_tokens=20), **options)
    engine.step()
    engine.add(make_sequence(1, num_tokens=20, max_tokens=4))
    plans = []
    while (step := engine.step()) is not None:
        plans.append(step.plan)
    assert not any(plan.has_proposals for plan in plans if plan.prefills)
    assert [plan.has_proposals for plan in plans[:4]] == [False, False, False, True]


def test_steps_overlap_while_prompts_leave_no_place_for_proposals() -> None:
    """The last of them does not, as the step behind it has proposals."""
    costs = CheckCosts(beside_prompts=False)
    sizes: dict[str, Any] = {"page_size": 64, "num_pages": 16, "prefill_chunk": 8}
    engine = make_engine(
        make_sequence(max_tokens=60), propose=truth, num_speculative_tokens=4, check_costs=costs, depth=1, **sizes
    )
    engine.step()
    engine.add(make_sequence(1, num_tokens=40, max_tokens=4))
    launched_ahead = []
    while (step := engine.step()) is not None:
        if step.plan.prefills:
            launched_ahead.append(engine.num_in_flight)
    assert launched_ahead == [1, 1, 1, 1, 0]
