"""Sequences that share pages are swapped with them: each page once, and it is shared again afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.execute.clients import Clients, crowd
from tests.workers.execute.factories import make_beams, make_group, make_scheduler
from triptych.workers.execute.engine import StepOutputs
from triptych.workers.execute.scheduling.sequence import Key, Sequence

CACHES = pytest.mark.parametrize("prefix_cache", [False, True], ids=["no cache", "cache"])


def step_until_preempted(clients: Clients, key: Key) -> StepOutputs:
    for _ in range(200):
        step = clients.step()
        assert step is not None, f"{key} was never preempted"
        if key in step.plan.preempted:
            return step
    raise AssertionError(f"{key} was never preempted")


def num_computed(steps: list[StepOutputs], beams: list[Sequence]) -> int:
    keys = {beam.key for beam in beams}
    return sum(chunk.num_tokens for step in steps for chunk in step.plan.chunks if chunk.key in keys)


@CACHES
@pytest.mark.parametrize("preemption", ["auto", "swap"])
@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("budget", [None, 4], ids=["one step", "beams in turn"])
def test_swapped_search_continues_and_computes_nothing_twice(
    preemption: str, page_size: int, prefix_cache: bool, budget: int | None
) -> None:
    options = {"preemption": preemption, "prefix_cache": prefix_cache, "max_num_batched_tokens": budget}
    computed = []
    for num_pages in (400, 80 // page_size):
        beams = make_beams(0, 3, num_tokens=9, max_tokens=20)
        clients = crowd(beams, page_size=page_size, num_pages=num_pages, host_pages=160 // page_size, **options)
        computed.append(num_computed(clients.close(), beams))
    assert clients.engine.stats.num_swaps >= 3
    assert computed[0] == computed[1]


def test_page_shared_by_beams_is_moved_once_and_shared_again() -> None:
    beams = make_beams(0, 3, num_tokens=9, max_tokens=20)
    clients = crowd(beams)
    step = step_until_preempted(clients, beams[0].key)
    moved = [page for page, _ in step.plan.moves.swap_out]
    tables = [list(beam.host_table) for beam in beams]
    named = {page for table in tables for page in table}
    assert len(moved) == len(set(moved)) == len(named) < sum(len(table) for table in tables)
    back = next(step for step in clients.close() if beams[0].key in step.plan.started)
    assert {beam.key for beam in beams} <= set(back.plan.started)
    moved = [page for _, page in back.plan.moves.swap_in]
    assert set(moved) == named
    assert all(moved.count(page) == 1 for table in tables for page in table[:-1])  # the last one is copied at once
    assert clients.engine.stats.num_free_host_pages == 40


def test_computed_beams_wait_for_the_others_after_a_preemption() -> None:
    """With three tokens per step, two of which are decodes, a search computes one beam per step."""
    beams = make_beams(0, 3, num_tokens=9, max_tokens=20)
    clients = crowd(beams, max_num_batched_tokens=3)
    step_until_preempted(clients, beams[0].key)
    assert clients.engine.scheduler.roster.num_swapped == 3
    missing = [beam.key for beam in beams if beam.num_computed_tokens < beam.num_tokens]
    steps = clients.close()
    back = next(index for index, step in enumerate(steps) if beams[0].key in step.plan.started)
    assert 0 < len(missing) < 3
    assert {chunk.key for chunk in steps[back].plan.chunks} & {beam.key for beam in beams} == set(missing)


def test_page_about_to_be_copied_is_swapped_out_from_its_source() -> None:
    cache = make_scheduler(host_pages=40).cache
    parent, child = make_beams(0, 2, num_tokens=6)
    cache.extend(parent, 6)
    parent.num_computed_tokens = 6
    cache.fork(child, parent)
    full, tail = parent.block_table
    cache.extend(child, 1)
    assert cache.swap_out([parent, child])
    assert [page for page, _ in cache.take_moves().swap_out] == [full, tail, tail]


@pytest.mark.parametrize(
    "options", [{"preemption": "recompute"}, {"host_pages": 3}, {"host_pages": 0}], ids=["recompute", "full", "none"]
)
def test_search_that_cannot_be_swapped_starts_again(options: dict[str, Any]) -> None:
    beams = make_beams(0, 3, num_tokens=9, max_tokens=20)
    clients = crowd(beams, **options)
    step_until_preempted(clients, beams[0].key)
    assert [beam.num_computed_tokens for beam in beams] == [0, 0, 0]
    clients.close()


def test_abort_of_a_swapped_search_frees_its_host_pages() -> None:
    beams = make_beams(0, 3, num_tokens=9, max_tokens=20)
    clients = crowd(beams)
    step_until_preempted(clients, beams[0].key)
    assert clients.engine.stats.num_free_host_pages < 40
    clients.engine.release(beams[1].key)
    clients.engine.check()
    assert clients.engine.stats.num_free_host_pages == 40
    assert clients.engine.stats.num_swapped == 0


def test_several_swapped_searches_all_return() -> None:
    clients = crowd(make_beams(0, 3, num_tokens=9, max_tokens=12), host_pages=200, max_num_seqs=9)
    for index in (5, 10):
        clients.add_search(make_beams(index, 3, num_tokens=5 + index, max_tokens=12))
    clients.close()
    assert clients.engine.stats.num_swaps >= 6


@CACHES
def test_host_pages_of_a_sample_are_not_moved_again_for_its_sibling(prefix_cache: bool) -> None:
    group = make_group(0, 3, num_tokens=22, max_tokens=30)
    clients = Clients(num_pages=16, host_pages=60, prefill_chunk=64, preemption="swap", prefix_cache=prefix_cache)
    for sequence in group:
        clients.add(sequence)
    step_until_preempted(clients, group[2].key)
    second = step_until_preempted(clients, group[1].key)
    tables = [group[index].host_table for index in (1, 2)]
    assert tables[0][:5] == tables[1][:5]
    assert len(second.plan.moves.swap_out) == len(tables[0]) - 5
    clients.close()


@CACHES
def test_samples_that_together_outgrow_the_pool_return_one_by_one(prefix_cache: bool) -> None:
    """There would never be enough pages for all of them."""
    group = make_group(0, 3, num_tokens=9, max_tokens=30)
    clients = Clients(num_pages=15, host_pages=60, preemption="swap", prefix_cache=prefix_cache)
    for sequence in group:
        clients.add(sequence)
    starts = [step.plan.started for step in clients.close() if step.plan.moves.swap_in]
    assert [group[2].key] in starts
