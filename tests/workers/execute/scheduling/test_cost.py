"""Costs are learned from steps with a given cost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.execute.factories import (
    chunks_of,
    expected_output,
    make_engine,
    make_scheduler,
    make_sequence,
    make_sequences,
    run,
)
from triptych.workers.execute.scheduling.cost import CostModel, Work
from triptych.workers.execute.scheduling.plan import Plan
from triptych.workers.execute.scheduling.proposals import CheckCosts
from triptych.workers.execute.scheduling.scheduler import Scheduler


def cost_ms(work: Work) -> float:
    """Two milliseconds, 20 us per prompt token, 50 us per decode, 0.1 us per token of context."""
    return 2.0 + 0.02 * work.num_prefill_tokens + 0.05 * work.num_decodes + 1e-4 * work.num_reads


def random_work(rng: random.Random) -> Work:
    num_decodes = rng.randint(1, 32)
    return Work(rng.choice([0, rng.randint(1, 512)]), num_decodes, num_decodes * rng.randint(10, 2000))


def trained(*, num_steps: int = 200, noise: float = 0.0, seed: int = 0) -> CostModel:
    rng, model = random.Random(seed), CostModel()
    for _ in range(num_steps):
        work = random_work(rng)
        model.fit(work, cost_ms(work) * (1 + noise * rng.random()))
    return model


def predicted(model: CostModel, work: Work) -> float:
    value = model.predict(work)
    assert value is not None
    return value


def test_no_cost_is_predicted_from_a_few_steps() -> None:
    assert trained(num_steps=7).predict(Work(1, 1, 1)) is None
    assert trained(num_steps=7).prefill_tokens(10.0, Work(0, 1, 1)) is None


@pytest.mark.parametrize("seed", range(5))
def test_linear_cost_is_learned_exactly(seed: int) -> None:
    model, rng = trained(seed=seed), random.Random(99)
    for work in itertools.islice(iter(lambda: random_work(rng), None), 20):
        assert predicted(model, work) == pytest.approx(cost_ms(work), rel=1e-3)


def test_noisy_cost_is_seldom_exceeded() -> None:
    model, rng = trained(noise=0.2), random.Random(5)
    works = [random_work(rng) for _ in range(200)]
    num_exceeded = sum(cost_ms(work) * (1 + 0.2 * rng.random()) > predicted(model, work) for work in works)
    assert num_exceeded < 30


def test_a_few_disturbed_steps_change_little() -> None:
    rng, model = random.Random(0), CostModel()
    for index in range(200):
        work = random_work(rng)
        model.fit(work, cost_ms(work) + (300.0 if index % 25 == 0 else 0.0))
    assert predicted(model, Work(256, 8, 4000)) == pytest.approx(cost_ms(Work(256, 8, 4000)), rel=0.05)


def test_changed_cost_is_learned_again() -> None:
    model, rng = trained(), random.Random(3)
    for _ in range(600):
        work = random_work(rng)
        model.fit(work, 3 * cost_ms(work))
    assert predicted(model, Work(100, 4, 2000)) == pytest.approx(3 * cost_ms(Work(100, 4, 2000)), rel=0.02)


def test_cost_of_prompts_is_remembered_while_there_are_none() -> None:
    model = trained()
    for _ in range(2000):
        model.fit(Work(0, 8, 4000), cost_ms(Work(0, 8, 4000)))
    assert predicted(model, Work(512, 8, 4000)) == pytest.approx(cost_ms(Work(512, 8, 4000)), rel=0.02)


def test_no_price_is_negative_even_if_the_steps_suggest_it() -> None:
    model = CostModel()
    for size in range(1, 100):
        model.fit(Work(size, 1, 10), 10 - size / 20)
    assert predicted(model, Work(10_000, 1, 10)) >= predicted(model, Work(1, 1, 10)) > 0


@pytest.mark.parametrize("target_ms", [4.0, 6.0, 10.0])
def test_largest_chunk_within_the_target_is_found(target_ms: float) -> None:
    rest = Work(0, 8, 4000)
    num_tokens = trained().prefill_tokens(target_ms, rest)
    assert num_tokens is not None
    assert cost_ms(Work(num_tokens, 8, 4000 + num_tokens)) == pytest.approx(target_ms, rel=0.01)


def test_varying_times_reduce_the_chunk_by_at_most_half() -> None:
    rest = Work(0, 8, 4000)
    steady, noisy = trained().prefill_tokens(6.0, rest), trained(noise=1.5).prefill_tokens(9.0, rest)
    assert steady is not None
    assert noisy is not None
    assert noisy > 0


def test_no_prompt_token_fits_if_decodes_alone_exceed_the_target() -> None:
    assert trained().prefill_tokens(1.0, Work(0, 8, 4000)) == 0


# The scheduler with a target


def paced(**options: Any) -> Scheduler:
    """Four decoding sequences, after their prompts have taught the cost of a step."""
    decodes = [make_sequence(index, num_tokens=40, max_tokens=400) for index in range(4)]
    size: dict[str, Any] = {"num_pages": 1024, "prefill_chunk": 256, "max_num_seqs": 8}
    scheduler = make_scheduler(*decodes, itl_target_ms=4.0, **size, **options)
    for _ in itertools.islice(steps(scheduler), 20):
        pass
    return scheduler


def steps(scheduler: Scheduler) -> Iterator[Plan]:
    """Steps that take as long as ``cost_ms`` says."""
    while (plan := scheduler.plan()) is not None:
        scheduler.apply(plan, [1] * len(plan.sampled))
        scheduler.observe(plan, int(1e6 * cost_ms(Work.of(plan))))
        yield plan


@pytest.mark.parametrize("num_speculative_tokens", [0, 8])
def test_steps_with_a_long_prompt_meet_the_target_and_use_it(num_speculative_tokens: int) -> None:
    guess = {"num_speculative_tokens": num_speculative_tokens, "propose": lambda sequence, count: [1] * count}
    scheduler = paced(**guess)
    scheduler.add(make_sequence(9, num_tokens=2000))
    plans = list(itertools.takewhile(lambda plan: 9 in chunks_of(plan), steps(scheduler)))
    times = [cost_ms(Work.of(plan)) for plan in plans]
    assert max(times) <= 4.0 * 1.05
    assert sum(chunks_of(plan)[9] for plan in plans) >= 2000
    assert min(times[:-8]) > 3.0
    assert all(plan.has_proposals == (num_speculative_tokens > 0) for plan in plans)


def test_prompts_leave_no_time_for_proposals_that_are_not_checked_beside_them() -> None:
    """As on a GPU. There would be more of them than the target has time for, so the prompt would wait."""
    costs = CheckCosts(token=0.001, max_tokens=128, beside_prompts=False)
    scheduler = paced(num_speculative_tokens=15, propose=lambda sequence, count: [1] * count, check_costs=costs)
    for sequence in scheduler.running.values():
        sequence.chance = 0.9
    scheduler.add(make_sequence(9, num_tokens=2000))
    plans = list(itertools.takewhile(lambda plan: 9 in chunks_of(plan), steps(scheduler)))
    assert sum(chunks_of(plan)[9] for plan in plans) >= 2000
    assert min(cost_ms(Work.of(plan)) for plan in plans[:-8]) > 3.0
    assert not any(plan.has_proposals for plan in plans[:-8])


def test_without_a_target_chunks_have_their_maximum_size() -> None:
    scheduler = make_scheduler(make_sequence(0, num_tokens=4, max_tokens=99), prefill_chunk=256, num_pages=1024)
    plans = steps(scheduler)
    next(plans)
    scheduler.add(make_sequence(9, num_tokens=2000))
    assert chunks_of(next(plans))[9] == 256


def test_prompts_progress_occasionally_if_the_target_cannot_be_met() -> None:
    scheduler = paced(max_prefill_skip=4)
    assert scheduler._pace is not None
    scheduler._pace._target_ms = 0.5
    scheduler.add(make_sequence(9, num_tokens=200))
    chunks = [chunks_of(plan).get(9, 0) for plan in itertools.islice(steps(scheduler), 15)]
    assert chunks == [0, 0, 0, 0, 64] * 3


def test_without_decodes_no_chunk_is_limited() -> None:
    scheduler = paced()
    for index in range(4):
        scheduler.release((index, 0))
    scheduler.add(make_sequence(9, num_tokens=600))
    assert chunks_of(next(steps(scheduler))) == {9: 256}


def test_memory_deadlock_is_resolved_even_if_the_target_allows_no_chunk() -> None:
    rng = random.Random(5)
    clock = itertools.accumulate(rng.randrange(1_000_000, 3_000_000) for _ in itertools.count())
    sequences = make_sequences(4, num_tokens=6, max_tokens=200)  # more than the pool of 64 pages holds
    engine = make_engine(*sequences, clock=lambda: next(clock), itl_target_ms=4.0, max_num_seqs=8)
    assert run(engine) == {sequence.key: expected_output(sequence) for sequence in sequences}
