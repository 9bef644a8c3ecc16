from __future__ import annotations

import pytest

from triptych.workers.execute.scheduling.limbo import Limbo
from triptych.workers.execute.scheduling.pages import PagePool

A, B, C = (0, 7), (1, 7), (2, 7)


def make_limbo(**last_steps: int) -> tuple[PagePool, Limbo]:
    """A pool of nine pages, and a limbo with two pages each for ``A``, ``B``, ``C``, oldest first."""
    pool = PagePool(9, 4)
    limbo = Limbo(pool)
    for key, step in zip((A, B, C), last_steps.values(), strict=False):
        limbo.put(key, pool.allocate(2), step)
    return pool, limbo


def test_pages_wait_for_the_release() -> None:
    pool, limbo = make_limbo(a=1)
    limbo.complete(1)
    assert pool.num_free == 7
    limbo.release(A)
    assert pool.num_free == 9


@pytest.mark.parametrize("released_at", [1, 2])
def test_released_pages_wait_for_the_last_step_that_touches_them(released_at: int) -> None:
    pool, limbo = make_limbo(a=3)
    for step in (1, 2):
        limbo.complete(step)
        if step == released_at:
            limbo.release(A)
        assert pool.num_free == 7
    limbo.complete(3)
    assert pool.num_free == 9


def test_second_release_changes_nothing() -> None:
    pool, limbo = make_limbo(a=0)
    limbo.release(A)
    limbo.release(A)
    assert pool.num_free == 9


@pytest.mark.parametrize("key", [(5, 7), (0, 6), (0, 8)], ids=["unknown", "older generation", "newer generation"])
def test_release_of_another_key_changes_nothing(key: tuple[int, int]) -> None:
    pool, limbo = make_limbo(a=0)
    limbo.release(key)
    assert pool.num_free == 7


def test_oldest_pages_are_reused_without_a_release_under_pressure() -> None:
    pool, limbo = make_limbo(a=0, b=0, c=0)
    limbo.reclaim(5)
    assert pool.num_free == 5
    assert A not in limbo
    assert B in limbo


def test_release_of_reused_pages_changes_nothing() -> None:
    pool, limbo = make_limbo(a=0)
    limbo.reclaim(9)
    limbo.release(A)
    assert pool.num_free == 9


def test_pages_that_a_step_still_touches_are_not_reused() -> None:
    pool, limbo = make_limbo(a=2, b=1)
    limbo.complete(1)
    limbo.reclaim(9)
    assert pool.num_free == 7
    assert not limbo.reclaimable()
    assert limbo.num_pages == 2
