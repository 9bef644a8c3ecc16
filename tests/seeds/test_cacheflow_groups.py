"""Cacheflow's groups, forks, beams and swapping: capabilities that come later (R-CF and N-CF)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.checks import expected
from tests.seeds.support import sequence_of
from tests.workers.execute.factories import expected_output, make_engine, make_sequences
from triptych import Driver
from triptych.protocol.config import CacheConfig, SchedulerConfig
from triptych.protocol.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from tests.seeds.tiny_engine import TinyEngine

GROUPS = "later: groups (several samples of one prompt)"
BEAMS = "later: beam search"


def samples_of(driver: Driver, prompt: list[int], **options: Any) -> list[list[int]]:
    """The token ids of every sample of one request."""
    answer: Any = driver.generate(prompt, **options)
    return [choice.token_ids for choice in answer.choices]


def swapping(**options: Any) -> tuple[Any, list[Any]]:
    """An engine that swaps, with more sequences than its pages hold, and the outputs of every step."""
    sequences = make_sequences(4, num_tokens=6, max_tokens=20)
    engine: Any = make_engine(*sequences, num_pages=9, preemption="swap", **options)
    steps = []
    while engine.has_work:
        steps.append(engine.step())
        engine.check()
    assert [s.output_tokens.tolist() for s in sequences] == [expected_output(s) for s in sequences]
    return engine, steps


def test_r_cf_1_the_queues_waiting_running_and_swapped_are_reported(driver: Driver) -> None:
    """``stats`` counts each of the three."""
    execute = driver.stats()["execute"]
    assert {"waiting", "decoding", "swapped"} <= set(execute)


@pytest.mark.xfail(strict=True, raises=InvalidRequest, reason=GROUPS)
def test_r_cf_2_one_request_is_a_group_of_n_sequences(driver: Driver) -> None:
    """Its results carry their index; n=1 and n=8 work alike."""
    assert samples_of(driver, [1, 2], max_tokens=5, n=1) == [expected([1, 2], 5)]
    assert samples_of(driver, [1, 2], max_tokens=5, n=8) == [expected([1, 2], 5)] * 8


def test_r_cf_6_the_way_of_preempting_can_be_chosen() -> None:
    """auto, recompute and swap exist, anything else is an error that names them."""
    for name in ("auto", "recompute", "swap"):
        SchedulerConfig(preemption=name)
    with pytest.raises(ConfigError, match="auto, recompute, swap"):
        SchedulerConfig(preemption="forget")


def test_r_cf_8_swapped_pages_come_back_bit_by_bit() -> None:
    """Texts are those without swapping; with a full host pool the sequence is recomputed instead."""
    engine, _ = swapping(host_pages=16)
    assert engine.stats.num_swaps > 0
    swapping(host_pages=1)


def test_r_cf_9_nobody_is_swapped_out_and_in_again_by_turns() -> None:
    """One that was swapped out in a step does not come back in that step."""
    _, steps = swapping(host_pages=16)
    assert not any(set(step.plan.preempted) & set(step.plan.started) for step in steps)


@pytest.mark.xfail(strict=True, raises=InvalidRequest, reason=GROUPS)
def test_r_cf_13_a_shared_page_is_copied_before_it_is_written(driver: Driver) -> None:
    """Samples of one prompt diverge without touching each other, also inside its last page."""
    samples = samples_of(driver, [9] * 21, max_tokens=30, n=4, temperature=1.0, seed=5)
    alone = [samples_of(driver, [9] * 21, max_tokens=30, n=1, temperature=1.0, seed=5 + i)[0] for i in range(4)]
    assert samples == alone


@pytest.mark.xfail(strict=True, raises=InvalidRequest, reason=BEAMS)
def test_r_cf_14_a_beam_that_survives_keeps_its_pages_when_others_fork_from_it(driver: Driver) -> None:
    """The best hypothesis does not change when more of them are kept."""
    best = [samples_of(driver, [4, 5, 6], max_tokens=12, beam_width=width)[0] for width in (2, 4)]
    assert best[0] == best[1]


@pytest.mark.xfail(strict=True, raises=InvalidRequest, reason=GROUPS)
def test_r_cf_15_the_pages_of_a_prompt_are_held_once_for_all_samples(slow: Driver) -> None:
    """n=3 of a prompt of ten pages holds ten pages and three tails."""
    stream = slow.submit([5] * 160, max_tokens=3000, n=3, temperature=1.0)
    next(iter(stream))
    held = slow.stats()["execute"]["pages_held"]
    stream.abort()
    assert 10 < held <= 13


@pytest.mark.xfail(strict=True, raises=TypeError, reason=BEAMS)
def test_r_cf_16_beam_search_equals_that_of_transformers(tiny: TinyEngine) -> None:
    """k hypotheses sorted by score, the same as ``generate(num_beams=k)``."""
    import torch

    prompt = [40, 41, 42]
    beams = tiny.model.generate(torch.tensor([prompt]), num_beams=3, max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    [best] = tiny.run(sequence_of(prompt, max_tokens=8, beam_width=3))
    assert best == beams[0, 3:].tolist()


def test_r_cf_19_a_step_never_swaps_in_both_directions() -> None:
    """It may consist of swaps alone."""
    _, steps = swapping(host_pages=16)
    assert any(step.plan.moves.swap_in for step in steps)
    assert not any(step.plan.moves.swap_in and step.plan.moves.swap_out for step in steps)


def test_r_cf_22_statistics_are_kept_as_a_time_series(tmp_path: Path) -> None:
    """Tokens in, swapped, preempted, queue lengths and use of both pools, a JSON line each, bounded in memory."""
    file = tmp_path / "steps.jsonl"
    with Driver("hash-lm", trace=str(file)) as driver:
        driver.generate([1, 2, 3], max_tokens=5)
        assert {"swaps", "preemptions", "batch_tokens", "host_pages_free"} <= set(driver.stats()["execute"])
    lines = [line for line in map(json.loads, file.read_text().splitlines()) if "step" in line]
    assert len(lines) == 5
    assert all({"step", "ms", "waiting", "pages_free", "pages_cached"} <= set(line) for line in lines)


def test_r_cf_23_sharing_and_fragmentation_are_reported(driver: Driver) -> None:
    """``stats`` has logical and physical pages, and tokens reserved but not filled."""
    assert {"pages_sharing", "pages_held", "tokens_reserved", "tokens_fragmented"} <= set(driver.stats()["execute"])


def test_n_cf_3_a_full_host_pool_kills_nobody() -> None:
    """Where no host page is left the victim is recomputed."""
    assert CacheConfig(host_pages=1)
    engine, _ = swapping(host_pages=1)
    assert engine.stats.num_preemptions > engine.stats.num_swaps


@pytest.mark.xfail(strict=True, raises=InvalidRequest, reason=BEAMS)
def test_n_cf_6_finished_beams_do_not_shrink_the_search(driver: Driver) -> None:
    """As many hypotheses as asked for come back, also when some end early, by length penalty and score."""
    stop = expected([3, 4], 4)[-1:]
    answer: Any = driver.generate([3, 4], max_tokens=20, beam_width=4, length_penalty=1.0, stop_token_ids=stop)
    assert len(answer.choices) == 4
    scores = [choice.score for choice in answer.choices]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.xfail(strict=True, raises=InvalidRequest, reason=GROUPS)
def test_n_cf_8_a_group_has_no_priority_over_single_sequences(slow: Driver) -> None:
    """A single request that came before a group starts before it."""
    first = slow.submit([1, 2], max_tokens=30)
    group = slow.submit([3, 4], max_tokens=30, n=3)
    assert len(group.result(20).choices) == 3  # type: ignore[attr-defined]
    assert first.result(20).token_ids == expected([1, 2], 30)
