from __future__ import annotations

import pytest

from triptych.workers.execute.scheduling.pages import PageLedgerError, PagePool


def test_trash_page_is_never_allocated() -> None:
    assert sorted(PagePool(5, 4).allocate(5)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("num_tokens", "num_pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)], ids=lambda n: str(n)
)
def test_number_of_pages_for_a_number_of_tokens(num_tokens: int, num_pages: int) -> None:
    assert PagePool(8, 16).pages_for(num_tokens) == num_pages


def test_allocating_more_pages_than_are_free_raises_and_takes_none() -> None:
    pool = PagePool(3, 4)
    with pytest.raises(PageLedgerError, match="4 pages requested, 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_freed_page_can_be_allocated_again() -> None:
    pool = PagePool(1, 4)
    pool.free(pool.allocate(1))
    assert pool.allocate(1) == [1]


def test_double_free_raises() -> None:
    pool = PagePool(3, 4)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(PageLedgerError, match="is not held"):
        pool.free(pages[:1])


def test_trash_page_cannot_be_freed() -> None:
    with pytest.raises(PageLedgerError, match="page 0"):
        PagePool(3, 4).free([0])


def test_shared_page_is_free_after_its_last_holder() -> None:
    pool = PagePool(3, 4)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.free(pages)
    assert pool.num_free == 2
    pool.free(pages)
    assert pool.num_free == 3


def test_free_page_cannot_be_shared() -> None:
    with pytest.raises(PageLedgerError, match="page 2 is not held"):
        PagePool(3, 4).share([2])


def test_check_accepts_pages_in_tables_in_limbo_and_shared() -> None:
    pool = PagePool(6, 4)
    first, second, gone = pool.allocate(2), pool.allocate(1), pool.allocate(2)
    pool.share(first)
    pool.check(tables=[first, first + second], limbo=[gone])


@pytest.mark.parametrize(
    "tables", [[[1]], [[1, 2], [1]], [[1, 2, 3]], [[1, 2, 0]]], ids=["lost", "twice", "free and held", "trash"]
)
def test_check_detects_a_wrong_ledger(tables: list[list[int]]) -> None:
    pool = PagePool(6, 4)
    assert pool.allocate(2) == [1, 2]
    with pytest.raises(PageLedgerError):
        pool.check(tables=tables, limbo=[])
