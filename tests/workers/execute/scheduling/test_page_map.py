"""Which sequence holds which page, as a map of limited size."""

from __future__ import annotations

import pytest

from tests.workers.execute.factories import advance, make_scheduler, make_sequence
from triptych.workers.execute.scheduling.page_map import CACHED, FIRST_OWNER, FREE, LIMBO, SHARED, map_pages


def cells(runs: list[int]) -> list[int]:
    return [code for code, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]


def test_each_page_belongs_to_the_sequence_that_holds_it() -> None:
    scheduler = make_scheduler(make_sequence(5, num_tokens=7), make_sequence(6, num_tokens=3), num_pages=8)
    advance(scheduler)
    found = map_pages(scheduler)
    assert (found.num_pages, found.pages_per_cell) == (8, 1)
    assert cells(found.runs) == [FIRST_OWNER + 5] * 2 + [FIRST_OWNER + 6] + [FREE] * 5
    assert found.held == [[5, 2], [6, 1]]


def test_pages_of_a_finished_sequence_are_in_limbo() -> None:
    scheduler = make_scheduler(make_sequence(0, num_tokens=4, max_tokens=1), num_pages=3)
    advance(scheduler)
    assert cells(map_pages(scheduler).runs) == [LIMBO, FREE, FREE]
    scheduler.release((0, 0))
    assert cells(map_pages(scheduler).runs) == [FREE] * 3


def test_shared_and_free_pages_are_distinguished() -> None:
    scheduler = make_scheduler(make_sequence(0, num_tokens=9, max_tokens=1, speaker=1), num_pages=8, prefix_cache=True)
    for _ in range(2):
        advance(scheduler)
    scheduler.release((0, 0))
    assert cells(map_pages(scheduler).runs).count(CACHED) == 2
    for index in (1, 2):
        scheduler.add(make_sequence(index, num_tokens=9, speaker=1))
    advance(scheduler)
    found = cells(map_pages(scheduler).runs)
    assert (found.count(SHARED), found.count(FIRST_OWNER + 1), found.count(FIRST_OWNER + 2)) == (2, 1, 1)


@pytest.mark.parametrize(("num_pages", "pages_per_cell", "num_cells"), [(10, 1, 10), (11, 2, 6), (95, 10, 10)])
def test_cell_of_a_large_pool_has_several_pages(num_pages: int, pages_per_cell: int, num_cells: int) -> None:
    scheduler = make_scheduler(make_sequence(0, num_tokens=1), num_pages=num_pages)
    advance(scheduler)
    found = map_pages(scheduler, max_cells=10)
    assert found.pages_per_cell == pages_per_cell
    assert cells(found.runs) == [FIRST_OWNER] + [FREE] * (num_cells - 1)
