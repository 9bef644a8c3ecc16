"""If an accepted request is unknown to the service later, its SUBMIT is repeated once, and it has one end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.driver.fake_service import FakeService, failed, finished, has_entry, row, submit
from triptych.driver.choices import GroupStream
from triptych.driver.exchange import MAX_RESUBMISSIONS
from triptych.driver.session import Session
from triptych.driver.stream import Stream
from triptych.protocol import messages as m
from triptych.protocol.errors import DuplicateId, UnknownRequest

pytestmark = pytest.mark.usefixtures("fast_repeats")

NUM_STALE = 2  # repetitions of the first SUBMIT that may still be in flight
UNKNOWN = failed("a", "unknown_id", "no request 'a' is live or kept")


def reply_unknown(service: FakeService) -> m.Submit:
    """Reply that the accepted request is unknown; returns the SUBMIT sent after that, not a repetition of the first."""
    service.send("follow", UNKNOWN)
    return [service.recv(m.Submit) for _ in range(NUM_STALE + 1)][-1]


def test_client_that_overtook_an_acknowledgement_gets_one_error_that_it_was_answered(
    service: FakeService, session: Session
) -> None:
    stream = submit(session)
    service.accept("a")
    assert reply_unknown(service) == m.Submit("a", {"prompt": "hello"})
    service.send("submit", m.Rejected("a", "duplicate_id", "the request 'a' has already been answered", "request_id"))
    with pytest.raises(DuplicateId, match="already been answered"):
        stream.result(10)


def test_answer_that_was_not_read_in_time_is_computed_again(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    reply_unknown(service)
    service.accept("a")
    service.send("follow", finished("a", 0, 5, text="x"))
    assert stream.result(10).text == "x"
    assert service.recv(m.Acknowledge) == m.Acknowledge(["a"])


def test_caller_sees_one_acceptance(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    reply_unknown(service)
    service.send("submit", m.Accepted("a", 2, 0, 32))
    service.recv(m.Follow)
    assert stream.accepted(10) == m.Accepted("a", 1, 0, 16)


def test_request_that_stays_unknown_fails(service: FakeService, session: Session) -> None:
    stream = submit(session)
    for _ in range(MAX_RESUBMISSIONS):
        service.accept("a")
        reply_unknown(service)
    service.accept("a")
    service.send("follow", UNKNOWN)
    with pytest.raises(UnknownRequest):
        stream.result(10)


def test_partly_received_answer_is_not_resubmitted(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    service.send("follow", m.Text([row("a", 0, 5, text="x")]))
    service.send("follow", UNKNOWN)
    with pytest.raises(UnknownRequest, match="no client was heard for longer than its lease") as caught:
        stream.result(10)
    assert caught.value.partial.text == "x"


def test_aborted_request_is_not_resubmitted(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    stream.abort()
    service.recv(m.Abort)
    service.send("follow", UNKNOWN)
    with pytest.raises(UnknownRequest):
        stream.result(10)


@pytest.mark.parametrize("limit", ["deadline_ms", "max_queue_ms"])
def test_request_past_its_deadline_is_not_resubmitted(service: FakeService, session: Session, limit: str) -> None:
    request: dict[str, Any] = {"prompt": "hello", limit: 1}
    stream = submit(session, **request)
    service.accept("a")
    service.recv(m.Follow)  # repeated after a while
    service.send("follow", UNKNOWN)
    with pytest.raises(UnknownRequest):
        stream.result(10)


def test_kept_answer_stays_kept_after_a_resubmission(service: FakeService, session: Session) -> None:
    stream = Stream("a", session)
    session.submit("a", {"prompt": "hello"}, stream, keep=True)
    service.accept("a")
    reply_unknown(service)
    service.accept("a")
    service.send("follow", finished("a", 0, 5, text="x"))
    assert stream.result(10).text == "x"
    service.settle(session)
    assert m.Acknowledge(["a"]) not in service.received


# -- of several choices


def submit_two(session: Session) -> GroupStream:
    group = GroupStream("a", 2, session)
    session.submit("a", {"prompt": "hello", "n": 2}, group, group.choices)
    return group


def accept_two(service: FakeService) -> None:
    service.recv(m.Submit)
    service.send("submit", m.Accepted("a", 1, 0, 16))
    service.recv(m.Follow, where=has_entry("a 1", 0, True))


def reply_two_unknown(service: FakeService) -> None:
    for name in ("a 0", "a 1"):
        service.send("follow", failed(name, "unknown_id", ""))
    for _ in range(NUM_STALE + 1):
        service.recv(m.Submit)


def test_all_choices_are_resubmitted_at_once(service: FakeService, session: Session) -> None:
    group = submit_two(session)
    accept_two(service)
    reply_two_unknown(service)
    accept_two(service)
    for name in ("a 0", "a 1"):
        service.send("follow", finished(name, 0, 5, text=name))
    assert [choice.result(10).text for choice in group.choices] == ["a 0", "a 1"]
    assert group.result(10).text == "a 0"


def test_each_choice_gets_one_error_that_its_request_was_answered(service: FakeService, session: Session) -> None:
    group = submit_two(session)
    accept_two(service)
    reply_two_unknown(service)
    service.send("submit", m.Rejected("a", "duplicate_id", "the request 'a' has already been answered", "request_id"))
    for stream in (*group.choices, group):
        with pytest.raises(DuplicateId):
            stream.result(10)


def test_choices_are_not_resubmitted_once_one_has_begun(service: FakeService, session: Session) -> None:
    group = submit_two(session)
    accept_two(service)
    service.send("follow", m.Text([row("a 1", 0, 5, text="x")]))
    service.send("follow", failed("a 0", "unknown_id", ""))
    with pytest.raises(UnknownRequest):
        group.choices[0].result(10)
    service.send("follow", finished("a 1", 0, 5, text="x"))
    assert group.choices[1].result(10).text == "x"


def test_id_can_be_reused_afterwards(service: FakeService, session: Session) -> None:
    submit_two(session)
    accept_two(service)
    reply_two_unknown(service)
    service.send("submit", m.Rejected("a", "duplicate_id", "", "request_id"))
    service.settle(session)
    stream = submit(session)
    service.accept("a")
    service.send("follow", finished("a", 0, 5, text="x"))
    assert stream.result(10).text == "x"
