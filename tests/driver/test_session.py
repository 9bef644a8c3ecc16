"""The client's thread repeats its messages until they are answered, whatever the other side does."""

from __future__ import annotations

import threading
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from tests.driver.fake_service import FakeService, finished, has_entry, submit
from triptych.driver import copies, exchange
from triptych.driver.exchange import Exchange
from triptych.driver.open_request import OpenRequest
from triptych.driver.session import Session
from triptych.driver.stream import NO_LISTENER, Assembly, Stream
from triptych.protocol import messages as m
from triptych.protocol.codec import MAX_DEPTH
from triptych.protocol.errors import (
    BadFrame,
    DuplicateId,
    InvalidRequest,
    Overloaded,
)

pytestmark = pytest.mark.usefixtures("fast_repeats")


# -- until it is accepted


def test_request_is_repeated_until_it_is_answered(service: FakeService, session: Session) -> None:
    submit(session, "a", prompt="hello")
    assert [service.recv(m.Submit) for _ in range(4)] == [m.Submit("a", {"prompt": "hello"})] * 4


def test_changing_the_fields_after_submit_has_no_effect(service: FakeService, session: Session) -> None:
    stop: list[Any] = ["x"]
    submit(session, "a", stop=stop, chat=({"role": "user"},))
    first = service.recv(m.Submit)
    stop.append(object())
    assert service.recv(m.Submit) == first == m.Submit("a", {"stop": ["x"], "chat": [{"role": "user"}]})


def test_accepted_request_is_not_repeated(service: FakeService, session: Session) -> None:
    submit(session)
    service.accept("a")
    messages = [service.recv_any(1.0) for _ in range(5)]
    assert {type(message) for message in messages} <= {m.Follow, m.Submit}
    assert not any(isinstance(message, m.Submit) for message in messages[1:]), "one may have been in flight"


def test_accepted_request_is_followed_from_its_beginning(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.recv(m.Submit)
    service.send("submit", m.Accepted("a", 1, 0, 16))
    assert service.recv(m.Follow) == m.Follow([["a", 0, True]])
    assert stream.accepted(10) == m.Accepted("a", 1, 0, 16)


def test_repeated_acceptance_is_ignored(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.recv(m.Submit)
    service.send("submit", m.Accepted("a", 1, 0, 16))
    service.send("submit", m.Accepted("a", 2, 0, 32))
    service.recv(m.Follow)
    service.send("follow", finished("a"))
    stream.result(10)
    assert stream.accepted() == m.Accepted("a", 1, 0, 16)


def test_detached_request_that_is_accepted_again_continues(service: FakeService, session: Session) -> None:
    """Its SUBMIT was repeated before the first ACCEPTED arrived; it was not refused, so it is not aborted."""
    stream = submit(session)
    service.recv(m.Submit)
    service.send("submit", m.Accepted("a", 1, 0, 16))
    service.recv(m.Follow)
    stream.accepted(10)
    session.detach("a")
    service.send("submit", m.Accepted("a", 1, 0, 16))
    submit(session, "b")
    service.recv(m.Submit, where=lambda message: message.request_id == "b")
    service.send("submit", m.Accepted("b", 2, 0, 16))
    service.recv(m.Follow, where=has_entry("b", 0, True))
    assert not any(isinstance(message, m.Abort | m.Acknowledge) for message in service.received)


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 65, "x" * 150], ids=["empty", "space", "long", "longer"])
def test_invalid_id_is_refused_at_once(service: FakeService, session: Session, request_id: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"1 to 64 .* of {len(request_id)} characters") as caught:
        submit(session, request_id).result(10)
    assert caught.value.param == "request_id"
    assert service.recv_any(0.0) is None


def test_refusal_is_raised(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.recv(m.Submit)
    service.send("submit", m.Rejected("a", "invalid_request", "top_p is 2, the limits are 0 and 1", "top_p"))
    with pytest.raises(InvalidRequest, match="top_p is 2") as caught:
        stream.result(10)
    assert caught.value.param == "top_p"


def test_overloaded_refusal_is_raised_and_the_request_may_be_sent_again(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.recv(m.Submit)
    service.send("submit", m.Rejected("a", "overloaded", "1024 requests are waiting, the limit is 1024", None))
    with pytest.raises(Overloaded):
        stream.result(10)
    again = submit(session)
    service.accept("a")
    service.send("follow", finished("a"))
    again.result(10)


def test_late_refusal_of_an_accepted_request_is_ignored(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    service.send("submit", m.Rejected("a", "overloaded", "full", None))
    service.send("follow", finished("a", 0, 5, text="x"))
    assert stream.result(10).text == "x"


def test_refusal_of_an_unknown_request_is_ignored(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.recv(m.Submit)
    service.send("submit", m.Rejected("", "bad_frame", "not a message", None))
    service.send("submit", m.Rejected("b", "overloaded", "full", None))
    service.accept("a")
    service.send("follow", finished("a"))
    stream.result(10)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "reason"),
    [(np.float32(0.5), "can not serialize 'numpy.float32' object"), (2**64, "Integer value out of range")],
    ids=["number of numpy", "huge integer"],
)
def test_field_that_cannot_be_encoded_is_named(session: Session, value: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"temperature cannot be encoded: {reason}") as caught:
        submit(session, "a", max_tokens=5, temperature=value).result(10)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize(
    "request_map",
    [
        {"prompt": "\ud800"},
        {"prompt": object()},
        {"seed": 2**64},
        {"logit_bias": {1: {1, 2}}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"prompt_token_ids": [-1] * 65_537},
        {"stop": nested(MAX_DEPTH + 1)},
    ],
    ids=["lone surrogate", "an object", "huge integer", "a set", "large map", "large array", "too deep"],
)
def test_request_that_the_service_cannot_decode_fails_alone(
    service: FakeService, session: Session, request_map: dict[str, Any]
) -> None:
    """The service cannot name the request, so without this the client would repeat it for ever."""
    other = submit(session, "other")
    stream = submit(session, "a", **request_map)
    with pytest.raises((InvalidRequest, BadFrame)):
        stream.result(10)
    service.accept("other")
    service.send("follow", finished("other"))
    other.result(10)


def limits(max_frame_bytes: int) -> m.Info:
    return m.Info({"limits": {"max_frame_bytes": max_frame_bytes}})


def test_large_request_waits_until_the_size_limit_is_known(service: FakeService, session: Session) -> None:
    submit(session, "large", prompt="x" * 5000)
    assert [service.recv_any(10), service.recv_any(10)] == [m.GetInfo()] * 2
    service.send("submit", limits(6000))
    service.accept("large")


def test_oversized_request_fails_alone_and_is_never_sent(service: FakeService, session: Session) -> None:
    stream = submit(session, "large", prompt="x" * 5000)
    service.recv(m.GetInfo)
    service.send("submit", limits(4000))
    with pytest.raises(InvalidRequest, match=r"the request has 50\d\d bytes, the limit is 4000"):
        stream.result(10)
    with pytest.raises(InvalidRequest, match="the limit is 4000"):
        submit(session, "again", prompt="x" * 4000).result(10)
    submit(session, "small", prompt="x" * 3000)
    assert service.recv(m.Submit).request_id == "small"


def test_restarted_service_is_asked_for_its_new_size_limit(service: FakeService, session: Session) -> None:
    """It disconnects senders of larger frames without a reply, so repeating the frame would be cut off for ever."""
    submit(session, "first", prompt="x" * 2000)
    service.recv(m.GetInfo)
    service.send("submit", limits(6000))
    service.accept("first")
    stream = submit(session, "large", prompt="x" * 5000)
    service.recv(m.GetInfo)
    service.send("submit", limits(4000))
    with pytest.raises(InvalidRequest, match="the limit is 4000"):
        stream.result(10)


def test_large_request_is_sent_once_however_many_questions_are_answered_meanwhile(
    service: FakeService, session: Session
) -> None:
    """Each copy may take a minute to arrive, and every later message waits for it."""
    submit(session, "large", prompt="x" * 5000)
    service.recv(m.GetInfo)
    for _ in range(20):
        service.send("submit", limits(6000))
    service.settle(session)
    assert [message.request_id for message in service.received if isinstance(message, m.Submit)].count("large") == 1


def test_restarted_service_is_sent_a_large_request_at_once(
    service: FakeService, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "SEND_AGAIN_S", 3600.0)
    submit(session, "large", prompt="x" * 5000)
    service.recv(m.GetInfo)
    service.send("submit", limits(6000))
    service.recv(m.Submit)
    service.close_socket("submit")
    service.open_socket("submit", epoch=2)
    service.recv(m.GetInfo)
    service.send("submit", limits(6000))
    assert service.recv(m.Submit).request_id == "large"


def test_unanswered_question_for_the_size_limit_becomes_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers are larger, and come all at once when a slow line is free again."""
    clock, sent_at = Mock(), list[float]()
    clock.monotonic.return_value = 0.0
    monkeypatch.setattr(exchange, "time", clock)
    asking = Exchange(Mock(queue=lambda *_: sent_at.append(clock.monotonic())))
    asking.begin(OpenRequest(m.Submit("large", {"prompt": "x" * 5000}), Assembly("large"), NO_LISTENER))
    for clock.monotonic.return_value in np.arange(0.0, 60.0, exchange.REPEAT_S):
        asking.resend_due()
    assert sent_at[1] < 2 * exchange.REPEAT_S
    assert sent_at[-1] - sent_at[-2] == pytest.approx(exchange.MAX_ASK_S, abs=2 * exchange.REPEAT_S)


@pytest.mark.parametrize("request_id", ["\ud800", 5, ["a"]], ids=["lone surrogate", "number", "list"])
def test_id_that_cannot_be_encoded_fails_alone(service: FakeService, session: Session, request_id: Any) -> None:
    stream, resumed = submit(session, request_id), Stream(request_id, session)
    session.resume(request_id, resumed, num_tokens=0, num_chars=0)
    for refused in (stream, resumed):
        with pytest.raises((InvalidRequest, BadFrame)):
            refused.result(10)
    with pytest.raises((InvalidRequest, BadFrame)):
        session.ask(m.GetStatus(request_id)).result(10)
    with pytest.raises((InvalidRequest, BadFrame)):
        session.forget(request_id)
    session.abort(request_id)
    session.detach(request_id)
    submit(session, "small")
    service.accept("small")


@pytest.mark.parametrize("start", [-1, 2**63, 3.0, "3", None, True], ids=repr)
@pytest.mark.parametrize("name", ["num_tokens", "num_chars"])
def test_resuming_from_an_invalid_offset_fails_alone(
    service: FakeService, session: Session, name: str, start: Any
) -> None:
    if (name, start) == ("num_chars", None):
        return  # an unknown offset
    other, resumed = submit(session, "other"), Stream("a", session)
    service.accept("other")
    session.resume("a", resumed, **{"num_tokens": 0, "num_chars": 0, name: start})
    with pytest.raises(InvalidRequest, match=f"{name} must be an int, 0 or more") as caught:
        resumed.result(10)
    assert caught.value.param == name
    service.send("follow", finished("other"))
    other.result(10)


def test_invalid_question_that_timed_out_disturbs_nothing(service: FakeService, session: Session) -> None:
    begin, stream = threading.Event(), submit(session)
    session._order(begin.wait)
    assert session.ask(m.GetStatus(cast(str, 5))).cancel()
    begin.set()
    service.accept("a")
    service.send("follow", finished("a"))
    stream.result(10)


def test_second_live_request_with_the_same_id_is_refused_locally(service: FakeService, session: Session) -> None:
    first, second = submit(session, "a"), submit(session, "a")
    with pytest.raises(DuplicateId, match="this client already has a live request 'a'") as caught:
        second.result(10)
    assert caught.value.param == "request_id"
    service.accept("a")
    service.send("follow", finished("a", text="mine"))
    assert first.result(10).text == "mine"


def test_id_can_be_reused_after_its_end(service: FakeService, session: Session) -> None:
    for text in ("first", "second"):
        stream = submit(session, "a")
        service.accept("a")
        service.send("follow", finished("a", text=text))
        assert stream.result(10).text == text
