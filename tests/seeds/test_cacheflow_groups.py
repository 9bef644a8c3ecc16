"""Cacheflow's groups, forks, beams and swapping (R-CF and N-CF)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.checks import expected
from tests.seeds.support import sequence_of, trace
from tests.waiting import eventually
from tests.workers.execute.factories import (
    expected_hypotheses,
    expected_output,
    make_beams,
    make_engine,
    make_sequences,
)
from triptych import Driver
from triptych.protocol.config import CacheConfig, SchedulerConfig
from triptych.protocol.errors import ConfigError

if TYPE_CHECKING:
    from tests.seeds.tiny_engine import TinyEngine


def samples_of(driver: Driver, prompt: list[int], **options: Any) -> list[list[int]]:
    """The token ids of every sample of one request."""
    return [choice.token_ids for choice in driver.generate(prompt, **options).choices]


def swapping(**options: Any) -> tuple[Any, list[Any]]:
    """An engine that swaps, with more sequences than fit into its pages, and the outputs of every step."""
    sequences = make_sequences(4, num_tokens=6, max_tokens=20)
    engine: Any = make_engine(*sequences, num_pages=9, preemption="swap", **options)
    steps = []
    while engine.has_work:
        steps.append(engine.step())
        engine.check()
    assert [s.output_tokens.tolist() for s in sequences] == [expected_output(s) for s in sequences]
    return engine, steps


def test_r_cf_1_queues_waiting_running_and_swapped_are_reported(driver: Driver) -> None:
    """``stats`` counts each of the three."""
    execute = driver.stats()["execute"]
    assert {"waiting", "decoding", "swapped"} <= set(execute)


def test_r_cf_2_request_is_a_group_of_n_sequences(driver: Driver) -> None:
    """Its results have their index; n=1 and n=8 work alike."""
    assert samples_of(driver, [1, 2], max_tokens=5, n=1) == [expected([1, 2], 5)]
    assert samples_of(driver, [1, 2], max_tokens=5, n=8) == [expected([1, 2], 5)] * 8
    assert [choice.index for choice in driver.generate([1, 2], max_tokens=5, n=3).choices] == [0, 1, 2]


def test_r_cf_6_preemption_mode_is_configurable() -> None:
    """auto, recompute and swap exist; any other value is an error that lists them."""
    for name in ("auto", "recompute", "swap"):
        SchedulerConfig(preemption=name)
    with pytest.raises(ConfigError, match="auto, recompute, swap"):
        SchedulerConfig(preemption="forget")


def test_r_cf_8_swapped_pages_are_restored_bit_for_bit() -> None:
    """Texts equal those without swapping; if the host pool is full, the sequence is recomputed instead."""
    engine, _ = swapping(host_pages=16)
    assert engine.stats.num_swaps > 0
    swapping(host_pages=1)


def test_r_cf_9_no_sequence_is_swapped_out_and_in_at_once() -> None:
    """A sequence that was swapped out in a step is not swapped in by the same step."""
    _, steps = swapping(host_pages=16)
    assert not any(set(step.plan.preempted) & set(step.plan.started) for step in steps)


def test_r_cf_13_shared_page_is_copied_before_it_is_written(driver: Driver) -> None:
    """Samples of one prompt diverge without affecting each other, also inside its last page."""
    samples = samples_of(driver, [9] * 21, max_tokens=30, n=4, temperature=1.0, seed=5)
    alone = [samples_of(driver, [9] * 21, max_tokens=30, n=1, temperature=1.0, seed=5 + i)[0] for i in range(4)]
    assert samples == alone


def test_r_cf_14_surviving_beam_keeps_its_pages_when_others_fork_from_it() -> None:
    """The first continuation of a beam keeps its pages; the others share the full ones and copy the last."""
    beams = make_beams(0, 3, num_tokens=6, max_tokens=9)
    engine = make_engine(*beams)
    kept, copied = 0, 0
    while engine.has_work:
        before = {beam.key: list(beam.block_table) for beam in beams if beam.block_table}
        step = engine.step()
        assert step is not None
        engine.check()
        copied += len(step.plan.moves.copies)
        kept += sum(
            beam.block_table[: len(before[beam.key])] == before[beam.key] for beam in beams if beam.key in before
        )
        if step.progress.hypotheses:
            assert [step.progress.hypotheses[beam.key] for beam in beams] == expected_hypotheses(beams[0])
    assert min(kept, copied) > 0


def test_r_cf_15_pages_of_a_prompt_are_held_once_for_all_samples(slow: Driver) -> None:
    """n=3 with a prompt of ten pages holds ten pages and three tails."""
    stream = slow.submit([5] * 160, max_tokens=3000, n=3, temperature=1.0)
    next(iter(stream))
    held = eventually(lambda: max(slow.stats()["execute"]["pages_held"] - 10, 0))
    eventually(lambda: slow.stats()["execute"]["pages_sharing"] > 2)
    stream.abort()
    assert held <= 9  # three pages, or a few more when the statistics were published; without sharing it would be 23


def test_r_cf_16_beam_search_equals_that_of_transformers(tiny: TinyEngine) -> None:
    """k hypotheses sorted by score, equal to ``generate(num_beams=k)``."""
    import torch

    prompt = [40, 41, 42]
    options: Any = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 8, "do_sample": False}
    wanted = tiny.model.generate(torch.tensor([prompt]), **options)
    beams = [sequence_of(prompt, index, max_tokens=8, num_beams=3, stop_ids=frozenset({2, 7})) for index in range(3)]
    for beam in beams:
        beam.group_key = (0, 0)
    [ended] = [step.progress for step in trace(tiny.engine(*beams)) if step.progress.hypotheses]
    found = [ended.hypotheses[beam.key] for beam in beams]
    assert [h.tokens for h in found] == [
        row[3 : 3 + len(h.tokens)].tolist() for row, h in zip(wanted, found, strict=True)
    ]
    assert sorted(found, key=lambda h: -h.score) == found


def test_r_cf_19_step_never_swaps_in_both_directions() -> None:
    """It may consist of swaps alone."""
    _, steps = swapping(host_pages=16)
    assert any(step.plan.moves.swap_in for step in steps)
    assert not any(step.plan.moves.swap_in and step.plan.moves.swap_out for step in steps)


def test_r_cf_22_statistics_are_kept_as_a_time_series(tmp_path: Path) -> None:
    """Tokens in, swapped, preempted, queue lengths and use of both pools, one JSON line each, bounded in memory."""
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


def test_n_cf_3_full_host_pool_ends_no_request() -> None:
    """If no host page is free, the victim is recomputed."""
    assert CacheConfig(host_pages=1)
    engine, _ = swapping(host_pages=1)
    assert engine.stats.num_preemptions > engine.stats.num_swaps


def test_n_cf_6_finished_beams_do_not_shrink_the_search(driver: Driver) -> None:
    """As many hypotheses as requested are returned, even if some end early, ranked by length penalty and score."""
    stop = expected([3, 4], 4)[-1:]
    options: Any = {"num_beams": 4, "n": 4, "length_penalty": 1.0, "stop_token_ids": stop}
    choices = driver.generate([3, 4], max_tokens=20, **options).choices
    assert len({tuple(choice.token_ids) for choice in choices}) == 4
    assert {choice.finish_reason for choice in choices} == {"stop", "length"}
    scores = [choice.score for choice in choices]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]


def test_n_cf_8_group_has_no_priority_over_single_sequences(slow: Driver) -> None:
    """A single request that came before a group starts before it."""
    first = slow.submit([1, 2], max_tokens=30)
    group = slow.submit([3, 4], max_tokens=30, n=3)
    later = slow.submit([5, 6], max_tokens=1)
    assert [choice.token_ids for choice in group.result(20).choices] == [expected([3, 4], 30)] * 3
    assert first.result(20).token_ids == expected([1, 2], 30)
    waits = [s.result(20).ledger["stages_ms"]["credit"] for s in (first, group, later)]
    assert waits == sorted(waits)
