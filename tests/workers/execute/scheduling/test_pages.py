from __future__ import annotations

import pytest

from triptych.workers.execute.scheduling.pages import PageLedgerError, PagePool


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


def test_check_accepts_pages_in_tables_in_limbo_and_shared() -> None:
    pool = PagePool(6, 4)
    first, second, gone = pool.allocate(2), pool.allocate(1), pool.allocate(2)
    pool.share(first)
    pool.check(tables=[first, first + second], limbo=[gone])


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ([[1]], "page 2 has 1 references, 0 entries"),
        ([[1, 2], [1]], "page 1 has 1 references, 2 entries"),
        ([[1, 2, 3]], "page 3 has 0 references, 1 entries, is 1 times in the free list"),
        ([[1, 2, 0]], "the trash page is in a block table"),
    ],
    ids=["lost", "twice", "free and held", "trash"],
)
def test_check_detects_a_wrong_ledger(tables: list[list[int]], reason: str) -> None:
    pool = PagePool(6, 4)
    assert pool.allocate(2) == [1, 2]
    with pytest.raises(PageLedgerError, match=reason):
        pool.check(tables=tables, limbo=[])
