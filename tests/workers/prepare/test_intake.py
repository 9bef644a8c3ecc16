"""What is said to an id that comes again."""

from __future__ import annotations

import pytest

from triptych.protocol.errors import DuplicateId
from triptych.protocol.messages import Accepted
from triptych.protocol.owners import HOUSE
from triptych.protocol.record import mark_of
from triptych.workers.prepare.intake import Known, KnownIds

ACCEPTED = Accepted("a", 3, 0, 8)


def known_ids(*past: tuple[str, int]) -> KnownIds:
    ids = KnownIds(past, max_past=2)
    ids.begin("a", 7)
    return ids


def test_the_same_request_is_known_while_it_is_live() -> None:
    ids = known_ids()
    assert ids.seen("a", 7) == Known(7)
    ids.accept(ACCEPTED, 7, (4, 1))
    assert ids.seen("a", 7) == Known(7, ACCEPTED, (4, 1))


def test_another_request_of_a_live_id_is_refused() -> None:
    with pytest.raises(DuplicateId, match="live"):
        known_ids().seen("a", 8)


def test_a_request_is_repeated_by_who_may_ask_for_it() -> None:
    """Also that of a key, after a start with --share-requests on the same journal: from then on all are the house."""
    ids, first = KnownIds([("past", mark_of(7, 5))], max_past=2), mark_of(7, 5)
    ids.accept(ACCEPTED, first, (4, 1))
    assert ids.seen("a", first) == ids.seen("a", mark_of(7, HOUSE)) == Known(first, ACCEPTED, (4, 1))
    with pytest.raises(DuplicateId, match="already been answered"):
        ids.seen("past", mark_of(7, HOUSE))
    for other in (mark_of(7, 6), mark_of(8, HOUSE)):
        with pytest.raises(DuplicateId, match="live"):
            ids.seen("a", other)


def test_a_request_that_was_read_is_refused_and_one_that_nobody_read_begins_anew() -> None:
    ids = known_ids()
    ids.forget("a", was_read=True)
    with pytest.raises(DuplicateId, match="already been answered"):
        ids.seen("a", 7)
    ids.begin("b", 7)
    ids.forget("b", was_read=False)
    assert ids.seen("b", 7) is None


def test_a_refusal_forgets_what_was_not_accepted_only() -> None:
    ids = known_ids()
    ids.refuse("a")
    assert ids.seen("a", 7) is None
    ids.accept(ACCEPTED, 7, (4, 1))
    ids.refuse("a")
    assert ids.seen("a", 7) is not None


def test_the_oldest_past_ids_make_room() -> None:
    ids = known_ids(("x", 1), ("y", 1))
    ids.forget("a", was_read=True)
    assert ids.seen("x", 1) is None
    with pytest.raises(DuplicateId):
        ids.seen("y", 1)
