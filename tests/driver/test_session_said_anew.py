"""A request that was accepted and is unknown to who answers it: its SUBMIT is said once more, and it has one end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.driver.fake_service import FakeService, failed, finished, has_entry, row, submit
from triptych.driver.choices import GroupStream
from triptych.driver.exchange import MAX_SAID_ANEW
from triptych.driver.session import Session
from triptych.driver.stream import Stream
from triptych.protocol import messages as m
from triptych.protocol.errors import DuplicateId, UnknownRequest

pytestmark = pytest.mark.usefixtures("impatient")

NUM_STALE = 2  # repetitions of the first SUBMIT that may still be under way
UNKNOWN = failed("a", "unknown_id", "no request 'a' is live or kept")


def say_unknown(service: FakeService) -> m.Submit:
    """Nobody knows the request that was accepted; the SUBMIT that follows, and no repetition of an earlier one."""
    service.say("follow", UNKNOWN)
    return [service.hear(m.Submit) for _ in range(NUM_STALE + 1)][-1]


def test_who_overtook_an_acknowledgement_hears_once_that_it_was_answered(
    service: FakeService, session: Session
) -> None:
    stream = submit(session)
    service.accept("a")
    assert say_unknown(service) == m.Submit("a", {"prompt": "hello"})
    service.say("submit", m.Rejected("a", "duplicate_id", "the request 'a' has already been answered", "request_id"))
    with pytest.raises(DuplicateId, match="already been answered"):
        stream.result(10)


def test_what_nobody_read_in_time_begins_anew(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    say_unknown(service)
    service.accept("a")
    service.say("follow", finished("a", 0, 5, text="x"))
    assert stream.result(10).text == "x"
    assert service.hear(m.Acknowledge) == m.Acknowledge(["a"])


def test_it_is_accepted_once_for_its_caller(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    say_unknown(service)
    service.say("submit", m.Accepted("a", 2, 0, 32))
    service.hear(m.Follow)
    assert stream.accepted(10) == m.Accepted("a", 1, 0, 16)


def test_what_stays_unknown_ends(service: FakeService, session: Session) -> None:
    stream = submit(session)
    for _ in range(MAX_SAID_ANEW):
        service.accept("a")
        say_unknown(service)
    service.accept("a")
    service.say("follow", UNKNOWN)
    with pytest.raises(UnknownRequest):
        stream.result(10)


def test_nobody_begins_anew_who_has_a_part_of_the_answer(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    service.say("follow", m.Text([row("a", 0, 5, text="x")]))
    service.say("follow", UNKNOWN)
    with pytest.raises(UnknownRequest) as caught:
        stream.result(10)
    assert caught.value.partial.text == "x"


def test_nobody_begins_anew_who_was_aborted(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    stream.abort()
    service.hear(m.Abort)
    service.say("follow", UNKNOWN)
    with pytest.raises(UnknownRequest):
        stream.result(10)


@pytest.mark.parametrize("limit", ["deadline_ms", "max_queue_ms"])
def test_nobody_begins_anew_whose_time_is_up(service: FakeService, session: Session, limit: str) -> None:
    request: dict[str, Any] = {"prompt": "hello", limit: 1}
    stream = submit(session, **request)
    service.accept("a")
    service.hear(m.Follow)  # said again after a while
    service.say("follow", UNKNOWN)
    with pytest.raises(UnknownRequest):
        stream.result(10)


def test_an_answer_that_is_kept_stays_kept_when_it_was_said_anew(service: FakeService, session: Session) -> None:
    stream = Stream("a", session.abort)
    session.submit("a", {"prompt": "hello"}, stream, keep=True)
    service.accept("a")
    say_unknown(service)
    service.accept("a")
    service.say("follow", finished("a", 0, 5, text="x"))
    assert stream.result(10).text == "x"
    service.settle(session)
    assert m.Acknowledge(["a"]) not in service.heard


# -- of several choices


def submit_two(session: Session) -> GroupStream:
    group = GroupStream("a", 2, session.abort)
    session.submit("a", {"prompt": "hello", "n": 2}, group, group.choices)
    return group


def accept_two(service: FakeService) -> None:
    service.hear(m.Submit)
    service.say("submit", m.Accepted("a", 1, 0, 16))
    service.hear(m.Follow, where=has_entry("a 1", 0, True))


def say_two_unknown(service: FakeService) -> None:
    for name in ("a 0", "a 1"):
        service.say("follow", failed(name, "unknown_id", ""))
    for _ in range(NUM_STALE + 1):
        service.hear(m.Submit)


def test_all_choices_are_said_anew_at_once(service: FakeService, session: Session) -> None:
    group = submit_two(session)
    accept_two(service)
    say_two_unknown(service)
    accept_two(service)
    for name in ("a 0", "a 1"):
        service.say("follow", finished(name, 0, 5, text=name))
    assert [choice.result(10).text for choice in group.choices] == ["a 0", "a 1"]
    assert group.result(10).text == "a 0"


def test_each_choice_hears_once_that_its_request_was_answered(service: FakeService, session: Session) -> None:
    group = submit_two(session)
    accept_two(service)
    say_two_unknown(service)
    service.say("submit", m.Rejected("a", "duplicate_id", "the request 'a' has already been answered", "request_id"))
    for stream in (*group.choices, group):
        with pytest.raises(DuplicateId):
            stream.result(10)


def test_choices_do_not_begin_anew_once_one_has_begun(service: FakeService, session: Session) -> None:
    group = submit_two(session)
    accept_two(service)
    service.say("follow", m.Text([row("a 1", 0, 5, text="x")]))
    service.say("follow", failed("a 0", "unknown_id", ""))
    with pytest.raises(UnknownRequest):
        group.choices[0].result(10)
    service.say("follow", finished("a 1", 0, 5, text="x"))
    assert group.choices[1].result(10).text == "x"


def test_the_id_is_free_for_another_request_afterwards(service: FakeService, session: Session) -> None:
    submit_two(session)
    accept_two(service)
    say_two_unknown(service)
    service.say("submit", m.Rejected("a", "duplicate_id", "", "request_id"))
    service.settle(session)
    stream = submit(session)
    service.accept("a")
    service.say("follow", finished("a", 0, 5, text="x"))
    assert stream.result(10).text == "x"
