"""What the client's thread does with the messages about a request, until its end and not after it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.driver.fake_service import REPEAT_S, FakeService, failed, finished, has_entry, packed, row, submit
from triptych.driver import exchange
from triptych.driver.choices import GroupStream
from triptych.driver.exchange import ACKNOWLEDGE_TOKENS
from triptych.driver.session import Session
from triptych.driver.stream import Stream
from triptych.protocol import messages as m
from triptych.protocol.errors import (
    InvalidRequest,
    ModelFailed,
    PipelineClosed,
    UnknownRequest,
)

pytestmark = pytest.mark.usefixtures("fast_repeats")


# -- until it ends


def test_rows_become_deltas_and_the_completion_is_their_sum(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    service.send("follow", m.Text([row("a", 0, 5, text="x")]))
    service.send("follow", m.Text([row("a", 1, 6, 7, text="yz", text_offset=1)]))
    service.send("follow", m.Finished("a", 3, 3, packed(8), "!", None, "stop", {"usage": {"n": 4}}))
    assert [(delta.token_ids, delta.text) for delta in stream] == [([5], "x"), ([6, 7], "yz"), ([8], "!")]
    result = stream.result()
    assert (result.token_ids, result.text) == ([5, 6, 7, 8], "xyz!")
    assert (result.finish_reason, result.usage) == ("stop", {"n": 4})


def test_one_message_may_have_rows_of_several_requests(service: FakeService, session: Session) -> None:
    streams = [submit(session, name) for name in "abc"]
    for name in "abc":
        service.accept(name)
    service.send("follow", m.Text([row(name, 0, i, text=name) for i, name in enumerate("abc")]))
    assert [next(iter(stream)).text for stream in streams] == ["a", "b", "c"]


def test_repeated_row_is_taken_once(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    for _ in range(3):
        service.send("follow", m.Text([row("a", 0, 5, 6, text="xy")]))
    service.send("follow", finished("a", 0, 5, 6, 7, text="xyz"))
    assert (stream.result(10).token_ids, stream.result().text) == ([5, 6, 7], "xyz")


@pytest.mark.parametrize("gap", [m.Text([row("a", 2, 7, text="z", text_offset=2)]), finished("a", 2, 7, text="z")])
def test_rows_after_a_gap_are_requested_again(service: FakeService, session: Session, gap: m.Text | m.Finished) -> None:
    stream = submit(session)
    service.accept("a")
    service.send("follow", m.Text([row("a", 0, 5, text="x")]))
    service.send("follow", gap)
    service.recv(m.Follow, where=has_entry("a", 1, True))
    service.send("follow", m.Text([row("a", 1, 6, 7, text="yz", text_offset=1)]))
    service.send("follow", m.Finished("a", 3, 3, b"", "", None, "stop", {}))
    assert (stream.result(10).token_ids, stream.result().text) == ([5, 6, 7], "xyz")


def test_impossible_text_offset_fails_the_request(service: FakeService, session: Session) -> None:
    """A caller that resumes with a wrong character count gets an error, instead of repeating for ever."""
    stream = Stream("a", session)
    session.resume("a", stream, num_tokens=2, num_chars=0)
    service.recv(m.Follow)
    service.send("follow", m.Text([row("a", 2, 7, text="z", text_offset=2)]))
    with pytest.raises(InvalidRequest, match="the first 2 tokens have 2 characters, not 0"):
        stream.result(10)


def test_request_is_followed_repeatedly_to_keep_its_lease(service: FakeService, session: Session) -> None:
    submit(session)
    service.accept("a")
    service.send("follow", m.Text([row("a", 0, 5, text="x")]))
    for _ in range(3):
        service.recv(m.Follow, where=has_entry("a", 1, False))


def test_tokens_are_acknowledged_in_batches(
    service: FakeService, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "REPEAT_S", 60.0)
    submit(session)
    service.accept("a")
    service.send("follow", m.Text([row("a", 0, *range(ACKNOWLEDGE_TOKENS - 1))]))
    service.send("follow", m.Text([row("a", ACKNOWLEDGE_TOKENS - 1, 5)]))
    service.recv(m.Follow, where=has_entry("a", ACKNOWLEDGE_TOKENS, False))


def test_end_is_acknowledged(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    service.send("follow", finished("a"))
    assert service.recv(m.Acknowledge) == m.Acknowledge(["a"])
    stream.result(10)


def test_repeated_end_is_acknowledged_again_and_reported_once(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    service.send("follow", finished("a", text="first"))
    service.recv(m.Acknowledge)
    service.send("follow", finished("a", text="second"))
    assert service.recv(m.Acknowledge) == m.Acknowledge(["a"])
    assert stream.result(10).text == "first"


def test_no_message_is_sent_about_an_ended_request(service: FakeService, session: Session) -> None:
    submit(session)
    service.accept("a")
    service.send("follow", finished("a"))
    service.recv(m.Acknowledge)
    assert service.recv_any(5 * REPEAT_S) is None


def test_failure_is_raised_with_the_answer_so_far(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    service.send("follow", m.Text([row("a", 0, 5, text="x")]))
    service.send("follow", m.Failed("a", 1, 1, packed(6), "y", None, "model_failed", "not a number", {}))
    with pytest.raises(ModelFailed, match="not a number") as caught:
        stream.result(10)
    assert (caught.value.partial.token_ids, caught.value.partial.text) == ([5, 6], "xy")
    assert caught.value.partial.finish_reason == "error"


def test_failure_is_acknowledged(service: FakeService, session: Session) -> None:
    submit(session)
    service.accept("a")
    service.send("follow", failed("a", "poisoned", "it killed execute twice"))
    assert service.recv(m.Acknowledge) == m.Acknowledge(["a"])


def test_resumed_request_is_followed_from_its_offset(service: FakeService, session: Session) -> None:
    stream = Stream("a", session)
    session.resume("a", stream, num_tokens=2, num_chars=3)
    service.recv(m.Follow, where=has_entry("a", 2, True))
    service.send("follow", m.Finished("a", 0, 0, packed(5, 6, 7), "abcd", None, "stop", {}))
    assert (stream.result(10).token_ids, stream.result().text) == ([7], "d")


def test_resuming_an_unknown_request_is_an_error(service: FakeService, session: Session) -> None:
    stream = Stream("a", session)
    session.resume("a", stream, num_tokens=0, num_chars=0)
    service.recv(m.Follow)
    service.send("follow", failed("a", "unknown_id", "no request 'a' is live or kept"))
    with pytest.raises(UnknownRequest):
        stream.result(10)


# -- detached requests


def test_end_of_a_detached_request_is_left_for_its_next_reader(service: FakeService, session: Session) -> None:
    submit(session)
    service.accept("a")
    session.detach("a")
    service.settle(session)
    service.send("follow", finished("a", 0, 5, text="x"))
    service.settle(session)
    assert m.Acknowledge(["a"]) not in service.received
    stream = Stream("a", session)
    session.resume("a", stream, num_tokens=0, num_chars=0)
    service.recv(m.Follow, where=has_entry("a", 0, True))
    service.send("follow", finished("a", 0, 5, text="x"))
    assert stream.result(10).text == "x"
    assert service.recv(m.Acknowledge) == m.Acknowledge(["a"])


def test_repeated_end_of_a_kept_answer_keeps_it(service: FakeService, session: Session) -> None:
    stream = Stream("a", session)
    session.submit("a", {"prompt": "hello"}, stream, keep=True)
    service.accept("a")
    for _ in range(2):
        service.send("follow", finished("a", 0, 5, text="x"))
        service.settle(session)
    assert stream.result(10).text == "x"
    assert m.Acknowledge(["a"]) not in service.received


def test_reused_and_detached_id_is_not_acknowledged(service: FakeService, session: Session) -> None:
    submit(session)
    service.accept("a")
    service.send("follow", finished("a"))
    service.recv(m.Acknowledge)
    submit(session)
    service.accept("a")
    session.detach("a")
    service.settle(session)
    service.send("follow", finished("a"))
    service.settle(session)
    assert service.received.count(m.Acknowledge(["a"])) == 1


def test_rows_received_before_a_repeated_acceptance_are_requested_again(service: FakeService, session: Session) -> None:
    """The request is detached and submitted again: summarize knows the follower while prepare may be slow."""
    first = submit(session)
    service.accept("a")
    first.accepted(10)
    session.detach("a")
    stream = submit(session)
    service.send("follow", m.Text([row("a", 0, 5, text="x")]))
    service.send("follow", finished("a", 0, 5, 6, text="xy"))
    service.settle(session)
    assert not stream.done
    assert m.Acknowledge(["a"]) not in service.received
    service.recv(m.Submit, where=lambda message: message.request_id == "a")
    service.send("submit", m.Accepted("a", 1, 0, 16))
    service.recv(m.Follow, where=has_entry("a", 0, True))
    service.send("follow", finished("a", 0, 5, 6, text="xy"))
    assert (stream.accepted(10).request_id, stream.result(10).token_ids) == ("a", [5, 6])


def test_request_detached_before_its_acceptance_is_repeated_until_then_and_not_aborted(
    service: FakeService, session: Session
) -> None:
    submit(session)
    service.recv(m.Submit)
    session.detach("a")
    service.settle(session)
    service.recv(m.Submit, where=lambda message: message.request_id == "a")
    service.send("submit", m.Accepted("a", 1, 0, 16))
    service.settle(session)
    assert {message.request_id for message in service.received if isinstance(message, m.Submit)} == {"a", "last"}
    assert m.Abort("a") not in service.received
    assert {entry[0] for message in service.received if isinstance(message, m.Follow) for entry in message.entries} == {
        "last"
    }


def test_request_detached_before_its_acceptance_can_be_resumed(service: FakeService, session: Session) -> None:
    submit(session)
    service.recv(m.Submit)
    session.detach("a")
    stream = Stream("a", session)
    session.resume("a", stream, num_tokens=0, num_chars=0)
    service.accept("a")
    service.send("follow", finished("a", 0, 5, text="x"))
    assert stream.result(10).text == "x"


def test_choices_of_a_request_detached_before_its_acceptance_are_not_followed(
    service: FakeService, session: Session
) -> None:
    group = GroupStream("a", 2, session)
    session.submit("a", {"prompt": "hello", "n": 2}, group, group.choices)
    service.recv(m.Submit)
    session.detach("a", PipelineClosed("enough"))
    with pytest.raises(PipelineClosed, match="enough"):
        group.choices[1].result(10)
    service.send("submit", m.Accepted("a", 1, 0, 16))
    service.settle(session)
    assert {entry[0] for message in service.received if isinstance(message, m.Follow) for entry in message.entries} == {
        "last"
    }
    assert not any(isinstance(message, m.Abort) for message in service.received)


# -- aborts


def test_abort_is_repeated_until_the_end_arrives(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    stream.abort()
    assert [service.recv(m.Abort) for _ in range(3)] == [m.Abort("a")] * 3
    service.send("follow", finished("a", 0, 5, text="x", reason="abort"))
    assert (stream.result(10).finish_reason, stream.result().text) == ("abort", "x")


def test_abort_before_the_acceptance_is_sent_after_it(service: FakeService, session: Session) -> None:
    stream = submit(session)
    stream.abort()
    service.recv(m.Submit)
    service.recv(m.Submit)
    service.send("submit", m.Accepted("a", 1, 0, 16))
    assert service.recv(m.Abort) == m.Abort("a")


def test_abort_of_an_unknown_request_sends_nothing(service: FakeService, session: Session) -> None:
    session.abort("never heard of")
    assert service.recv_any(3 * REPEAT_S) is None


# -- listeners


class Broken(Stream):
    """A caller whose callbacks raise."""

    def on_accepted(self, accepted: m.Accepted) -> None:
        raise RuntimeError("accepted")

    def on_delta(self, delta: Any) -> None:
        raise RuntimeError("delta")


def test_listener_that_raises_disturbs_nothing(service: FakeService, session: Session) -> None:
    broken = Broken("broken", session)
    session.submit("broken", {"prompt": "x"}, broken)
    service.accept("broken")
    other = submit(session, "other")
    service.accept("other")
    for name in ("broken", "other"):
        service.send("follow", m.Text([row(name, 0, 5, text="x")]))
        service.send("follow", m.Finished(name, 1, 1, b"", "", None, "stop", {}))
    assert other.result(10).text == "x"
    assert broken.result(10).text == "x"
