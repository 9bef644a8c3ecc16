"""The reply to a request id that is used again."""

from __future__ import annotations

import pytest

from triptych.protocol.errors import DuplicateId
from triptych.protocol.messages import Accepted
from triptych.protocol.owners import HOUSE
from triptych.protocol.record import mark_of
from triptych.workers.prepare.known_ids import Known, KnownIds

ACCEPTED = Accepted("a", 3, 0, 8)


def known_ids(*past: tuple[str, int]) -> KnownIds:
    ids = KnownIds(past, max_past=2)
    ids.begin("a", 7)
    return ids


def test_repeated_request_is_recognised_while_it_is_live() -> None:
    ids = known_ids()
    assert ids.seen("a", 7) == Known(7)
    ids.accept(ACCEPTED, 7, (4, 1))
    assert ids.seen("a", 7) == Known(7, ACCEPTED, (4, 1))


def test_other_request_with_a_live_id_is_refused() -> None:
    with pytest.raises(DuplicateId, match="live"):
        known_ids().seen("a", 8)


def test_request_can_be_repeated_by_its_owner() -> None:
    """Also after a restart with --share-requests on the same journal: then every client owns all requests."""
    ids, first = KnownIds([("past", mark_of(7, 5))], max_past=2), mark_of(7, 5)
    ids.accept(ACCEPTED, first, (4, 1))
    assert ids.seen("a", first) == ids.seen("a", mark_of(7, HOUSE)) == Known(first, ACCEPTED, (4, 1))
    with pytest.raises(DuplicateId, match="already been answered"):
        ids.seen("past", mark_of(7, HOUSE))
    for other in (mark_of(7, 6), mark_of(8, HOUSE)):
        with pytest.raises(DuplicateId, match="live"):
            ids.seen("a", other)


def test_read_request_is_refused_and_an_unread_one_starts_again() -> None:
    ids = known_ids()
    ids.forget("a", was_read=True)
    with pytest.raises(DuplicateId, match="already been answered"):
        ids.seen("a", 7)
    ids.begin("b", 7)
    ids.forget("b", was_read=False)
    assert ids.seen("b", 7) is None


def test_refusal_only_forgets_ids_that_were_not_accepted() -> None:
    ids = known_ids()
    ids.refuse("a")
    assert ids.seen("a", 7) is None
    ids.accept(ACCEPTED, 7, (4, 1))
    ids.refuse("a")
    assert ids.seen("a", 7) is not None


def test_oldest_past_ids_are_dropped() -> None:
    ids = known_ids(("x", 1), ("y", 1))
    ids.forget("a", was_read=True)
    assert ids.seen("x", 1) is None
    with pytest.raises(DuplicateId):
        ids.seen("y", 1)
