"""Transformers continuous batching: later requirements (R-HF-10 to 14, 18, 19, 26), and its defects (N-HF)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipeline.checks import expected
from tests.seeds.support import end_all, outcome, sequence_of, trace
from tests.workers.execute.factories import (
    advance,
    chunks_of,
    expected_output,
    make_engine,
    make_group,
    make_scheduler,
    make_sequence,
    run,
)
from tests.workers.execute.model.device.next_token import NextToken
from triptych import Driver
from triptych.protocol.config import SchedulerConfig
from triptych.protocol.errors import ConfigError, RequestTooLong
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.model.device.runner import DeviceRunner
from triptych.workers.execute.sampling.sampler import Sampler


def test_r_hf_10_computed_prompt_is_not_computed_again(driver: Driver) -> None:
    """The second of two equal prompts of 128 tokens computes one token, and gives the same answer."""
    prompt = [1 + i % 200 for i in range(128)]
    first, second = (driver.generate(prompt, max_tokens=5) for _ in range(2))
    assert first.token_ids == second.token_ids == expected(prompt, 5)
    assert second.usage["cached_tokens"] == 127


def test_r_hf_11_page_is_shared_once_its_step_has_completed() -> None:
    """Full pages of a completed step are found by the next equal prompt, those of a cancelled step are not."""
    prompt, computed = list(range(1, 33)), []
    for is_cancelled in (True, False):
        engine = make_engine(sequence_of(prompt, 0), prefill_chunk=64, prefix_cache=True)
        plan = engine.plan()
        assert plan is not None
        if is_cancelled:
            engine.release((0, 0))
        engine.launch(plan)
        engine.collect()
        engine.add(sequence_of(prompt, 1))
        computed.append(trace(engine)[0].plan.num_prefill_tokens)
    assert computed == [32, 1]


def test_r_hf_12_prefix_sharing_can_be_turned_off() -> None:
    """With prefix_cache=False, equal prompts are computed twice."""
    with Driver("hash-lm", prefix_cache=False) as driver:
        answers = [driver.generate([7] * 64, max_tokens=2) for _ in range(2)]
    assert [answer.usage["cached_tokens"] for answer in answers] == [0, 0]


def test_r_hf_13_several_samples_compute_their_prompt_once(driver: Driver) -> None:
    """n=3 prefills once and gives three different answers."""
    answer = driver.generate([5] * 40, max_tokens=6, n=3, temperature=1.0, seed=1)
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    assert answer.usage["prompt_tokens"] == 40
    # Two pages at least: the third, half full, is shared only with a sequence that still runs.
    assert all(choice.usage["cached_tokens"] >= 32 for choice in answer.choices[1:])
    assert [len(c.token_ids) for c in driver.generate([6] * 40, max_tokens=1, n=3, temperature=1.0).choices] == [
        1,
        1,
        1,
    ]


@pytest.mark.parametrize("depth", [0, 1])
def test_r_hf_14_only_steps_that_fit_take_a_graph(depth: int) -> None:
    """Steps of decodes alone run as graphs, padded to a bucket, and so do mixed ones; larger ones do not."""
    forward = NextToken()
    runner = DeviceRunner(
        [], forward, Sampler(()), device=torch.device("cpu"), max_sampled=8, max_pages=16, capture=lambda run: run,
        prefill_tokens=8, decode_rows=3,
    )  # fmt: skip
    runner.capture_graphs()
    sequences = [make_sequence(index, num_tokens=9, max_tokens=4 + 3 * index) for index in range(4)]
    engine = Engine(make_scheduler(*sequences, prefill_chunk=8, max_num_batched_tokens=12), runner, depth=depth)
    forward.num_tokens.clear()
    expected, num_graphs = [], 0
    for step in trace(engine):
        plan, num_decodes = step.plan, step.plan.num_decodes
        is_pure, fits = num_decodes == len(plan.chunks), num_decodes <= 3 and plan.num_tokens - num_decodes <= 8
        num_graphs += fits
        padded = num_decodes if is_pure else 3 + 8
        expected.append(padded if fits else plan.num_tokens)
    assert forward.num_tokens == expected
    assert 0 < runner.num_graph_steps == num_graphs < len(expected)
    for sequence in sequences:
        last = int(sequence.tokens[sequence.num_prompt_tokens - 1])
        assert sequence.output_tokens.tolist() == [(last + 1 + i) % 97 for i in range(sequence.max_tokens)]


def test_r_hf_18_prefill_first_finishes_prompts_before_decodes() -> None:
    """Started prompts go before decodes, and a decode is not skipped for ever."""
    scheduler = make_scheduler(make_sequence(0, num_tokens=2), max_num_batched_tokens=8, policy="prefill_first")
    advance(scheduler)
    scheduler.add(make_sequence(1, num_tokens=24))
    assert [chunks_of(advance(scheduler)) for _ in range(3)] == [{0: 1, 1: 7}, {1: 8}, {1: 8}]


def test_r_hf_19_policies_are_chosen_by_name() -> None:
    """An unknown name is an error that lists those that exist."""
    with pytest.raises(ConfigError, match="policy is 'lifo', known are: ") as error:
        SchedulerConfig(policy="lifo")
    known = error.value.message.partition("known are: ")[2].split(", ")
    assert {"fifo", "prefill_first", "round_robin", "priority"} <= set(known)


def test_r_hf_26_steps_can_be_traced_to_a_file(tmp_path: Path) -> None:
    """One JSON line per step with its plan and its times; off by default."""
    file = tmp_path / "steps.jsonl"
    with Driver("hash-lm", trace=str(file)) as driver:
        driver.generate([1, 2, 3], max_tokens=5)
    steps = [line for line in map(json.loads, file.read_text().splitlines()) if "step" in line]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]


def test_n_hf_1_request_that_can_never_fit_fails_alone(small: Driver) -> None:
    """It is refused at submit, with the numbers; the others are served."""
    good = [small.submit([9, index], max_tokens=20) for index in range(1, 5)]
    bad = [outcome(small.submit([1] * length)) for length in (48, 49, 5000)]
    assert [str(error) for error in bad] == [
        f"prompt has {n} tokens, the limit is 47, one less than context and pages hold" for n in (48, 49, 5000)
    ]
    assert all(isinstance(error, RequestTooLong) for error in bad)
    assert [s.result(20).token_ids for s in good] == [expected([9, index], 20) for index in range(1, 5)]


@pytest.mark.parametrize("num_tokens", range(1, 19))
def test_n_hf_2_no_unneeded_page_is_allocated(num_tokens: int) -> None:
    """For every remainder of the length divided by the page size."""
    sequence = make_sequence(num_tokens=num_tokens)
    advance(make_scheduler(sequence, prefill_chunk=32, page_size=8))
    assert len(sequence.block_table) == -(-num_tokens // 8)


def test_n_hf_3_no_sequence_runs_and_waits_at_once() -> None:
    """When pages run out in the middle of a step, every sequence is in exactly one place: checked after every step."""
    rng = random.Random(3)
    sequences = [make_sequence(i, num_tokens=rng.randrange(1, 14), max_tokens=rng.randrange(1, 14)) for i in range(6)]
    engine = make_engine(*sequences, num_pages=7, prefill_chunk=5)
    run(engine)
    assert engine.scheduler.roster.num_preemptions > 0
    assert [s.output_tokens.tolist() for s in sequences] == [expected_output(s) for s in sequences]


@pytest.mark.parametrize("num_tokens", [16, 17, 31, 32, 64])
def test_n_hf_4_last_token_of_a_cached_prompt_never_writes_to_a_shared_page(driver: Driver, num_tokens: int) -> None:
    """Equal prompts, concurrent and sequential, at every page border, all get the same answer."""
    prompt = [3 + i % 100 for i in range(num_tokens)]
    streams = [driver.submit(prompt, max_tokens=40) for _ in range(4)]
    answers = [stream.result(20).token_ids for stream in streams] + [driver.generate(prompt, max_tokens=40).token_ids]
    assert answers == [expected(prompt, 40)] * 5


def test_n_hf_5_aborted_request_gets_its_terminal_message(slow: Driver) -> None:
    """Queued, live or running: the waiting client is notified."""
    streams = [slow.submit([2, index], max_tokens=4000) for index in range(1, 10)]
    next(iter(streams[1]))
    assert [getattr(answer, "finish_reason", answer) for answer in end_all(streams)] == ["abort"] * 9


@pytest.mark.parametrize("seed", range(6))
def test_n_hf_6_there_is_no_silent_stall(seed: int) -> None:
    """While a sequence is live, every call of ``plan`` makes progress, for any sizes and limits."""
    rng = random.Random(seed)
    sequences = [make_sequence(i, num_tokens=rng.randrange(1, 30), max_tokens=rng.randrange(1, 30)) for i in range(6)]
    options: dict[str, Any] = {"page_size": rng.choice([1, 2, 4]), "prefill_chunk": rng.randrange(1, 9)}
    budget, margin = rng.randrange(1, 12), rng.choice([0.0, 0.2, 1.0])
    engine = make_engine(
        *sequences, num_pages=40 // options["page_size"], max_num_batched_tokens=budget, safety_margin=margin, **options
    )
    trace(engine)
    for sequence in sequences:
        produced = sequence.output_tokens.tolist()
        assert produced == expected_output(sequence)[: len(produced)]
        assert len(produced) == sequence.max_tokens or sequence.num_tokens > 40 - options["page_size"]


def test_n_hf_7_group_is_forked_only_after_its_prompt_was_computed(driver: Driver) -> None:
    """A group whose prompt step fails leaves no half-made members; one that succeeds has all of them."""
    answer = driver.generate([VOCAB_SIZE - 2] * 20, max_tokens=3, n=4)
    assert [choice.token_ids for choice in answer.choices] == [expected([VOCAB_SIZE - 2] * 20, 3)] * 4
    group = make_group(0, 3, num_tokens=20)
    engine = make_engine(*group, prefill_chunk=64)
    plan = engine.scheduler.plan()
    assert plan is not None
    assert plan.sampled == [group[0].key]
    engine.scheduler.apply(plan, [0], failed={group[0].key: "bad luck"})
    assert not any(sequence.block_table for sequence in group)
    assert list(run(engine).values()) == [expected_output(sequence) for sequence in group[1:]]
