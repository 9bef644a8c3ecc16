"""Host pages and the index of prefixes, without sequences."""

from __future__ import annotations

import pytest

from triptych.workers.execute.scheduling.host import HostPool
from triptych.workers.execute.scheduling.pages import PageLedgerError
from triptych.workers.execute.scheduling.prefix import Match, PageNode, PrefixIndex

HERE, AWAY = PageNode(None, b"", 1, page=3), PageNode(None, b"", 1, host_page=3)


@pytest.mark.parametrize(
    ("match", "is_away"),
    [
        (Match([]), False),
        (Match([HERE], HERE, 3), False),
        (Match([HERE, AWAY]), True),
        (Match([HERE], AWAY, 3), True),
        (Match([AWAY], HERE, 3), True),
    ],
    ids=["nothing", "all here", "a page", "the tail", "a page before the tail"],
)
def test_match_is_away_if_any_part_of_it_is(match: Match, is_away: bool) -> None:
    """Or its step would swap in and out."""
    assert match.is_away == is_away


def test_page_has_one_twin() -> None:
    host = HostPool(2)
    first, second = host.allocate(2)
    host.pair(5, first)
    host.pair(6, first)
    assert (host.twin(5), host.twin(6), host.twin_on_device(first)) == (None, first, 6)
    host.pair(6, second)
    assert (host.twin(6), host.twin_on_device(first), host.twin_on_device(second)) == (second, None, 6)
    host.check([[first, second]], [])


def test_lost_host_page_is_named() -> None:
    host = HostPool(3)
    host.check([], [])
    host._free.remove(1)
    with pytest.raises(PageLedgerError, match=r"host pages \[1\] are lost or held twice"):
        host.check([], [])


def test_salt_without_prefixes_is_forgotten() -> None:
    """Each tenant may have its own, or each request."""
    index = PrefixIndex(2)
    first = index.add(index.root(b"root"), b"12345678")
    last = index.add(first, b"abcdefgh")
    index.remove(last)
    assert list(index._roots) == [b"root"]
    assert index.add(index.root(b"root"), b"12345678") is first
    index.remove(first)
    assert not index._roots
