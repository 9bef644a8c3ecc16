"""Samples of one request compute their prompt once, share its pages, and never write to each other's pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.workers.execute.factories import (
    expected_output,
    make_engine,
    make_group,
    make_sequence,
    recover,
    run,
    tokens_of,
)
from triptych.workers.execute.engine import Engine, StepOutputs
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.scheduling.groups import Groups
from triptych.workers.execute.scheduling.prefix import PageNode
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.step import StepInputs, StepResult

CACHES = pytest.mark.parametrize("prefix_cache", [False, True], ids=["no cache", "cache"])


def steps_of(engine: Engine, count: int = 10_000) -> list[StepOutputs]:
    """That many steps, or fewer if there is no more work."""
    steps: list[StepOutputs] = []
    while engine.has_work and len(steps) < count:
        step = engine.step()
        assert step is not None
        engine.check()
        steps.append(step)
    return steps


def num_prefilled(steps: list[StepOutputs]) -> int:
    return sum(step.plan.num_prefill_tokens for step in steps)


def assert_texts(sequences: list[Sequence]) -> None:
    assert [s.output_tokens.tolist() for s in sequences] == [expected_output(s) for s in sequences]


@CACHES
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 21])
def test_prompt_is_computed_once_and_its_last_token_by_each_sample(num_tokens: int, prefix_cache: bool) -> None:
    group = make_group(0, 4, num_tokens=num_tokens)
    steps = steps_of(make_engine(*group, prefix_cache=prefix_cache))
    assert num_prefilled(steps) == num_tokens + 3
    assert_texts(group)
    assert len({tuple(s.output_tokens) for s in group}) == 4


@CACHES
def test_pages_of_a_prompt_are_not_looked_up_for_each_pair_of_samples(
    prefix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 64 samples of a prompt of 20,000 tokens, that took half a second, in which no other answer went on."""
    looked_up, nodes_of = list[int](), Groups._nodes

    def record(self: Groups, pages: list[int]) -> list[PageNode]:
        looked_up.extend(pages)
        return nodes_of(self, pages)

    monkeypatch.setattr(Groups, "_nodes", record)
    group = make_group(0, 8, num_tokens=41, max_tokens=2)
    steps_of(make_engine(*group, prefix_cache=prefix_cache, prefill_chunk=64, max_num_seqs=8))
    assert len(looked_up) <= 2 * 7 * 10  # twice ten pages for each sample but the first
    assert_texts(group)


@CACHES
def test_samples_hold_the_pages_of_the_prompt_once(prefix_cache: bool) -> None:
    """Ten pages of prompt and a page for each of three samples; the hash model reads every cell of them."""
    group = make_group(0, 3, num_tokens=41, max_tokens=20)
    engine = make_engine(*group, prefix_cache=prefix_cache, prefill_chunk=64)
    steps_of(engine, 2)
    assert engine.stats.num_held_pages == 10 + 3
    assert engine.stats.num_table_entries == 3 * 11


def test_last_page_of_the_prompt_is_copied_except_for_its_owner() -> None:
    group = make_group(0, 3, num_tokens=6)
    first, second, *_ = steps_of(make_engine(*group))
    assert not first.plan.moves.copies
    sources, targets = (set(pages) for pages in zip(*second.plan.moves.copies, strict=True))
    assert len(sources) == 1
    assert len(targets) == 2
    assert first.plan.chunks[0].key == group[0].key


def test_page_aligned_prompt_shares_all_but_its_last_page() -> None:
    group = make_group(0, 2, num_tokens=8)
    engine = make_engine(*group)
    steps_of(engine, 2)
    assert group[0].block_table[0] == group[1].block_table[0]
    assert group[0].block_table[1] != group[1].block_table[1]
    steps_of(engine)
    assert_texts(group)


@CACHES
def test_samples_of_one_token_fork_from_the_ended_one(prefix_cache: bool) -> None:
    """Its pages are in limbo, because its release was not sent yet."""
    group = make_group(0, 3, num_tokens=21, max_tokens=1)
    steps = steps_of(make_engine(*group, prefix_cache=prefix_cache))
    assert num_prefilled(steps) == 21 + 2
    assert_texts(group)


def test_another_sample_computes_the_prompt_if_the_first_one_is_gone() -> None:
    group = make_group(0, 3, num_tokens=21, max_tokens=1)
    engine = make_engine(*group)
    while group[0].key in engine.scheduler.live:
        engine.step()
    engine.release(group[0].key)
    steps = steps_of(engine)
    assert num_prefilled(steps) == 21 + 1
    assert_texts(group)


@CACHES
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
def test_abort_of_the_first_sample_at_any_moment_does_not_affect_the_others(num_steps: int, prefix_cache: bool) -> None:
    group = make_group(0, 3, num_tokens=21)
    engine = make_engine(*group, prefix_cache=prefix_cache)
    steps_of(engine, num_steps)
    engine.release(group[0].key)
    steps_of(engine)
    assert_texts(group[1:])


def test_unrelated_requests_start_while_one_sample_computes_the_prompt() -> None:
    """The other samples wait for it; a later request does not."""
    group = make_group(0, 3, num_tokens=30)
    stranger = make_sequence(9, num_tokens=3)
    engine = make_engine(*group, stranger, max_num_batched_tokens=12, max_num_seqs=6)
    [step] = steps_of(engine, 1)
    assert {chunk.key for chunk in step.plan.chunks} == {group[0].key, stranger.key}
    assert len(engine.scheduler.waiting) == 2
    steps_of(engine)
    assert_texts([*group, stranger])


def test_late_sample_forks_too() -> None:
    first, late = make_group(0, 2, num_tokens=21, max_tokens=12)
    engine = make_engine(first)
    steps_of(engine, 5)
    engine.add(late)
    steps = steps_of(engine)
    assert num_prefilled(steps) == 1
    assert_texts([first, late])


@CACHES
@pytest.mark.parametrize("emitted", [(0, 0, 0), (3, 0, 5), (1, 7, 7), (0, 4, 4)])
def test_after_a_crash_the_prompt_is_computed_once_and_the_tokens_by_each_sample(
    emitted: tuple[int, ...], prefix_cache: bool
) -> None:
    group = [recover(s, count) for s, count in zip(make_group(0, 3, num_tokens=21), emitted, strict=True)]
    engine = make_engine(*group, prefix_cache=prefix_cache)
    steps = steps_of(engine)
    assert_texts(group)
    most = 21 + emitted[0] + sum(max(1, count) for count in emitted[1:])
    assert num_prefilled(steps) <= most


@CACHES
@pytest.mark.parametrize("preemption", ["auto", "recompute", "swap"])
@pytest.mark.parametrize("host_pages", [0, 3, 40])
@pytest.mark.parametrize("num_pages", [9, 11, 14])
def test_preempted_samples_are_unchanged(preemption: str, host_pages: int, num_pages: int, prefix_cache: bool) -> None:
    options: dict[str, Any] = {"preemption": preemption, "host_pages": host_pages, "num_pages": num_pages}
    group = make_group(0, 3, num_tokens=14, max_tokens=20)
    stranger = make_sequence(7, num_tokens=9, max_tokens=20)
    engine = make_engine(*group, stranger, prefix_cache=prefix_cache, **options)
    steps = steps_of(engine)
    assert engine.scheduler.roster.num_preemptions > 0
    assert_texts([*group, stranger])
    if host_pages == 40 and preemption != "recompute":
        assert engine.scheduler.roster.num_swaps > 0
    assert not any(step.plan.moves.swap_in and step.plan.moves.swap_out for step in steps)


def test_samples_are_swapped_where_single_sequences_are_recomputed() -> None:
    """With ``auto``, if they have computed less than a chunk."""
    group = make_group(0, 4, num_tokens=5, max_tokens=20)
    singles = [make_sequence(i, num_tokens=5, max_tokens=20) for i in range(4)]
    swaps = []
    for sequences in (group, singles):
        engine = make_engine(*sequences, num_pages=10, host_pages=40, prefill_chunk=64)
        run(engine)
        swaps.append(engine.scheduler.roster.num_swaps)
        assert_texts(list(sequences))
    assert swaps[0] > 0
    assert swaps[1] == 0


def test_failed_first_sample_is_not_forked() -> None:
    """Its pages are not trusted; another sample computes the prompt again."""
    group = make_group(0, 3, num_tokens=21)
    engine = make_engine(*group, prefill_chunk=64)
    plan = engine.scheduler.plan()
    assert plan is not None
    engine.scheduler.apply(plan, [0], failed={group[0].key: "bad luck"})
    steps = steps_of(engine)
    assert num_prefilled(steps) == 21 + 1
    assert_texts(group[1:])


def test_deadline_may_pass_while_a_sample_waits_for_its_prompt() -> None:
    group = make_group(0, 3, num_tokens=30)
    group[1].deadline_at = 2
    now = [0]
    engine = make_engine(*group, clock=lambda: now[0])
    steps_of(engine, 1)
    now[0] = 5
    steps = steps_of(engine)
    assert group[1].key in {key for step in steps for key in step.progress.expired}
    assert_texts([group[0], group[2]])


@pytest.mark.parametrize("num_snapshots", [None, 0], ids=["pages", "states"])
def test_sample_that_waits_counts_as_started_with_the_first(num_snapshots: int | None) -> None:
    """Also where samples cannot share their prompt, and the others wait for a place in a step."""
    group = make_group(0, 3, num_tokens=30)
    for sequence in group:
        sequence.queue_deadline_at = 2
    now = [0]
    engine = make_engine(*group, clock=lambda: now[0], num_snapshots=num_snapshots, max_num_batched_tokens=8)
    steps_of(engine, 1)
    now[0] = 5
    assert not [key for step in steps_of(engine) for key in step.progress.expired]
    assert_texts(group)


@CACHES
def test_many_groups_in_a_small_pool_finish(prefix_cache: bool) -> None:
    groups = [make_group(10 * i, 3, num_tokens=5 + 7 * i, max_tokens=9) for i in range(3)]
    everybody = [s for group in groups for s in group]
    engine = make_engine(*everybody, num_pages=10, max_num_seqs=6, prefix_cache=prefix_cache)
    tokens = [token for step in steps_of(engine) for token in tokens_of(step.progress)]
    assert len(tokens) == 9 * 9
    assert_texts(everybody)


@pytest.mark.parametrize("num_tokens", [5, 6, 7, 8])
def test_token_sampled_but_not_computed_by_a_sibling_is_not_shared(num_tokens: int) -> None:
    """Greedy siblings are equal, so the late one has the token that the first one computes next."""
    first, late = make_group(0, 2, num_tokens=num_tokens, max_tokens=16, temperature=0.0)
    engine = make_engine(first)
    steps_of(engine, 4)
    engine.add(recover(late, 9))
    steps_of(engine)
    assert_texts([first, late])


def test_sequence_that_failed_later_is_not_forked() -> None:
    """Its pages are in limbo, and their content is not trusted."""
    first, late = make_group(0, 2, num_tokens=21)
    engine = make_engine(first, prefill_chunk=64)
    steps_of(engine, 3)
    plan = engine.scheduler.plan()
    assert plan is not None
    engine.add(late)
    engine.scheduler.apply(plan, [0], failed={first.key: "bad luck"})
    assert num_prefilled(steps_of(engine)) == 21
    assert_texts([late])


class FailsOnceUnwritten(HashRunner):
    """Its first step writes nothing, and raises when it is collected."""

    has_failed = False

    def launch(self, inputs: StepInputs) -> None:
        if self.has_failed or self._results:
            super().launch(inputs)
        else:
            self._results.append(StepResult(np.zeros(len(inputs.sampled), np.int32)))

    def collect(self) -> StepResult:
        result = super().collect()
        if not self.has_failed:
            self.has_failed = True
            raise ValueError("bad luck")
        return result


def test_sample_that_expires_while_its_step_fails_is_not_forked() -> None:
    """The step is not run again for it, so its pages, which are in limbo, lack what was already counted as computed."""
    group = make_group(1, 3, num_tokens=21)
    group[0].deadline_at = 2
    now = [0]
    options: dict[str, Any] = {"runner": FailsOnceUnwritten, "depth": 1, "max_num_batched_tokens": 21}
    engine = make_engine(*group, prefill_chunk=64, clock=lambda: now[0], **options)
    for now[0] in (0, 5):
        plan = engine.plan()
        assert plan is not None
        engine.launch(plan)
        engine.add(make_sequence(2 * now[0], num_tokens=64))  # the second step has no room for the other samples
    steps_of(engine)
    assert_texts(group[1:])
