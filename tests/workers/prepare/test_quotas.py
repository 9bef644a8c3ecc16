"""Limits on the open requests of one client."""

from __future__ import annotations

import pytest

from triptych.protocol.errors import Overloaded
from triptych.workers.prepare.quotas import Quotas


def make_quotas(max_requests: int = 2, max_bytes: int = 100, max_unread: int = 100) -> Quotas:
    return Quotas(max_requests=max_requests, max_bytes=max_bytes, max_unread=max_unread)


def test_each_client_has_its_own_request_limit() -> None:
    quotas = make_quotas()
    for slot in range(2):
        quotas.check(b"a", 0)
        quotas.accepted(b"a", slot, 1)
    with pytest.raises(Overloaded, match=r"2 unanswered sequences.*max_client_requests, 2"):
        quotas.check(b"a", 0)
    quotas.check(b"b", 0)


def test_ended_request_frees_its_place_once() -> None:
    quotas = make_quotas(max_requests=2)
    quotas.accepted(b"a", 0, 1)
    quotas.accepted(b"a", 1, 1)
    quotas.released(0, 1)
    quotas.released(0, 1)
    quotas.accepted(b"a", 0, 2)
    with pytest.raises(Overloaded):
        quotas.check(b"a", 0)


def test_waiting_bytes_are_counted_per_client() -> None:
    quotas = make_quotas()
    quotas.waits(b"a", 80)
    with pytest.raises(Overloaded, match=r"80 bytes.*21 more.*max_client_bytes, 100"):
        quotas.check(b"a", 21)
    quotas.check(b"a", 20)
    quotas.check(b"b", 100)
    quotas.waited(b"a", 80)
    quotas.check(b"a", 100)
    quotas.check(b"a", 101)  # a frame may be larger than this limit, and would never be accepted


def test_bytes_that_still_wait_are_counted_when_others_no_longer_do() -> None:
    quotas = make_quotas()
    for num_bytes in (50, 40):
        quotas.waits(b"a", num_bytes)
    quotas.waited(b"a", 50)
    quotas.check(b"a", 60)
    with pytest.raises(Overloaded, match="40 bytes"):
        quotas.check(b"a", 61)


def test_request_of_an_earlier_process_is_not_counted() -> None:
    quotas = make_quotas()
    quotas.released(5, 5)
    quotas.check(b"a", 0)


def test_unread_answers_count_until_they_are_forgotten() -> None:
    """Each keeps its record in the journal, which all clients share."""
    quotas = make_quotas(max_unread=3)
    for slot in range(3):
        quotas.accepted(b"a", slot, 1)
        quotas.released(slot, 1)
    with pytest.raises(Overloaded, match=r"3 sequences with unacknowledged ends, the limit is 3"):
        quotas.check(b"a", 0)
    quotas.check(b"b", 0)
    quotas.forgotten(0, 1)
    quotas.forgotten(0, 1)
    quotas.check(b"a", 0)


def test_request_forgotten_before_its_release_was_noticed_no_longer_counts() -> None:
    quotas = make_quotas(max_requests=1, max_unread=1)
    quotas.accepted(b"a", 0, 1)
    quotas.forgotten(0, 1)
    quotas.check(b"a", 0)
