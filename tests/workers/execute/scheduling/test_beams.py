"""Beams of one search share pages, copy before they write, and always find its hypotheses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.execute.factories import (
    expected_hypotheses,
    expected_output,
    make_beams,
    make_engine,
    make_scheduler,
    make_sequence,
    run,
)
from triptych.workers.execute.engine import Engine, StepOutputs
from triptych.workers.execute.scheduling.beam_search import Hypothesis
from triptych.workers.execute.scheduling.cache import PageCache
from triptych.workers.execute.scheduling.sequence import Key, Sequence

STOPS = frozenset({5, 11, 23, 42, 60, 77})


def search(engine: Engine, *, max_steps: int = 5000) -> tuple[dict[Key, Hypothesis], list[StepOutputs]]:
    """All hypotheses of an engine that runs until nothing is left to do."""
    found: dict[Key, Hypothesis] = {}
    steps: list[StepOutputs] = []
    while engine.has_work:
        assert len(steps) < max_steps
        step = engine.step()
        assert step is not None, "sequences are live, but nothing was planned"
        engine.check()
        steps.append(step)
        found.update(step.progress.hypotheses)
        assert set(step.progress.hypotheses) <= set(step.progress.finished)
    return found, steps


def assert_found(found: dict[Key, Hypothesis], beams: list[Sequence]) -> None:
    assert [found[beam.key] for beam in beams] == expected_hypotheses(beams[0])


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("num_tokens", [1, 4, 7, 8])
@pytest.mark.parametrize("num_beams", [2, 3, 5])
def test_hypotheses_do_not_depend_on_pages(num_beams: int, num_tokens: int, page_size: int, prefix_cache: bool) -> None:
    beams = make_beams(0, num_beams, num_tokens=num_tokens, max_tokens=15, stop_ids=STOPS)
    engine = make_engine(*beams, page_size=page_size, num_pages=256, prefix_cache=prefix_cache, max_num_seqs=5)
    found, steps = search(engine)
    assert_found(found, beams)
    assert len({tuple(h.tokens) for h in found.values()}) == num_beams
    assert sum(chunk.num_tokens for step in steps for chunk in step.plan.chunks if not chunk.start) == num_tokens
    assert not any(step.progress.token_ids for step in steps)


def test_page_that_was_copied_for_a_beam_is_not_copied_again() -> None:
    cache = PageCache(8, 4, shares_prefixes=True)
    parent, child = make_beams(0, 2, num_tokens=6)
    cache.extend(parent, 6)
    parent.num_computed_tokens = 6
    cache.fork(child, parent)
    cache.extend(child, 2)
    child.num_computed_tokens = 8
    cache.publish(child)
    cache.pool.share(child.block_table)  # by another sequence that begins with these tokens
    assert len(cache.take_moves().copies) == 1
    cache.extend(child, 1)
    assert not cache.take_moves().copies


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_all_endings_of_a_search(early_stopping: bool | str, length_penalty: float) -> None:
    options: dict[str, Any] = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    beams = make_beams(0, 3, num_tokens=6, max_tokens=20, stop_ids=STOPS, **options)
    found, _ = search(make_engine(*beams))
    assert_found(found, beams)
    scores = [found[beam.key].score for beam in beams]
    assert scores == sorted(scores, reverse=True)


def test_beams_share_their_common_prefix() -> None:
    """Ten pages of prompt are held once, and each beam's own tokens fill at most two pages of four tokens."""
    beams = make_beams(0, 4, num_tokens=40, max_tokens=6)
    engine = make_engine(*beams, prefill_chunk=64)
    held = []
    while engine.has_work:
        engine.step()
        held.append(engine.stats.num_held_pages)
    assert max(held) <= 10 + 4 * 2
    assert engine.stats.sharing >= 1


def test_page_is_copied_only_while_others_hold_it() -> None:
    """The last beam that continues from a half-full page writes to it in place."""
    beams = make_beams(0, 3, num_tokens=6, max_tokens=4)
    engine = make_engine(*beams)
    _, steps = search(engine)
    first, second, *_ = steps
    assert not first.plan.moves.copies
    assert len(second.plan.moves.copies) == 2
    assert len(second.plan.chunks) == 3


@pytest.mark.parametrize("num_pages", [12, 14, 17])
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["no cache", "cache"])
def test_preempted_search_starts_again_and_finds_the_same(num_pages: int, prefix_cache: bool) -> None:
    early = [make_sequence(i, num_tokens=9, max_tokens=20) for i in range(2)]
    beams = make_beams(10, 3, num_tokens=9, max_tokens=9)
    engine = make_engine(*early, *beams, num_pages=num_pages, prefix_cache=prefix_cache)
    found, _ = search(engine)
    assert engine.scheduler.roster.num_preemptions > 0
    assert_found(found, beams)
    assert [s.output_tokens.tolist() for s in early] == [expected_output(s) for s in early]


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_beams_may_be_computed_in_different_steps(budget: int) -> None:
    beams = make_beams(0, 4, num_tokens=5, max_tokens=8)
    found, steps = search(make_engine(*beams, max_num_batched_tokens=budget))
    assert all(sum(chunk.num_tokens for chunk in step.plan.chunks) <= budget for step in steps)
    assert_found(found, beams)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_computed_beam_waits_until_the_others_are_computed_too(budget: int) -> None:
    """It would find the same once more, at the cost of a step, so only the number of steps shows it."""
    beams = make_beams(0, 4, num_tokens=5, max_tokens=8)
    _, steps = search(make_engine(*beams, max_num_batched_tokens=budget))
    computed = [(chunk.key, chunk.start) for step in steps for chunk in step.plan.chunks]
    assert len(set(computed)) == len(computed)


def test_two_searches_in_a_pool_for_one_both_finish() -> None:
    searches = [make_beams(10 * i, 3, num_tokens=9, max_tokens=9) for i in range(2)]
    found, _ = search(make_engine(*searches[0], *searches[1], num_pages=12, max_num_seqs=5))
    for beams in searches:
        assert_found(found, beams)


def test_search_that_can_never_fit_is_refused_with_both_numbers() -> None:
    beams = make_beams(0, 3, num_tokens=9, max_tokens=9)
    scheduler = make_scheduler(*beams, num_pages=10)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.failed == ((beams[0].key, "the beams may need 11 pages, the limit is 10"),)
    assert not scheduler.live


@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_abort_of_one_beam_ends_all(which: int, num_steps: int) -> None:
    beams = make_beams(0, 3, num_tokens=20, max_tokens=20)
    engine = make_engine(*beams)
    for _ in range(num_steps):
        engine.step()
    engine.release(beams[which].key)
    assert not engine.has_work
    engine.check()
    for beam in beams:
        engine.release(beam.key)
    assert engine.stats.num_free_pages == engine.stats.num_pages


def test_failed_beam_fails_its_search() -> None:
    beams = make_beams(0, 3, num_tokens=5, max_tokens=20)
    engine = make_engine(*beams)
    for _ in range(3):
        engine.step()
    plan = engine.scheduler.plan()
    assert plan is not None
    progress = engine.scheduler.apply(plan, [0] * len(plan.sampled), failed={beams[1].key: "bad luck"})
    assert progress.failed == {beams[1].key: "bad luck"}
    assert not engine.has_work


def test_beams_samples_and_single_sequences_share_steps() -> None:
    beams = make_beams(0, 3, num_tokens=5, max_tokens=10)
    others = [make_sequence(20 + i, num_tokens=5, max_tokens=10) for i in range(3)]
    engine = make_engine(*beams, *others, max_num_seqs=5)
    outputs = run(engine)
    assert all(outputs[s.key] == expected_output(s) for s in others)


def test_search_of_one_token_takes_one_step() -> None:
    beams = make_beams(0, 4, num_tokens=5, max_tokens=1)
    found, steps = search(make_engine(*beams))
    assert len(steps) == 1
    assert_found(found, beams)
