"""What the client's thread makes of what it is told of a request, until its end and never after it."""

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

pytestmark = pytest.mark.usefixtures("impatient")


# -- until it ends


def test_text_becomes_deltas_and_the_end_their_sum(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    service.say("follow", m.Text([row("a", 0, 5, text="x")]))
    service.say("follow", m.Text([row("a", 1, 6, 7, text="yz", text_offset=1)]))
    service.say("follow", m.Finished("a", 3, 3, packed(8), "!", None, "stop", {"usage": {"n": 4}}))
    assert [(delta.token_ids, delta.text) for delta in stream] == [([5], "x"), ([6, 7], "yz"), ([8], "!")]
    result = stream.result()
    assert (result.token_ids, result.text) == ([5, 6, 7, 8], "xyz!")
    assert (result.finish_reason, result.usage) == ("stop", {"n": 4})


def test_rows_of_several_requests_come_in_one_message(service: FakeService, session: Session) -> None:
    streams = [submit(session, name) for name in "abc"]
    for name in "abc":
        service.accept(name)
    service.say("follow", m.Text([row(name, 0, i, text=name) for i, name in enumerate("abc")]))
    assert [next(iter(stream)).text for stream in streams] == ["a", "b", "c"]


def test_a_row_that_comes_twice_is_taken_once(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    for _ in range(3):
        service.say("follow", m.Text([row("a", 0, 5, 6, text="xy")]))
    service.say("follow", finished("a", 0, 5, 6, 7, text="xyz"))
    assert (stream.result(10).token_ids, stream.result().text) == ([5, 6, 7], "xyz")


@pytest.mark.parametrize("gap", [m.Text([row("a", 2, 7, text="z", text_offset=2)]), finished("a", 2, 7, text="z")])
def test_a_gap_is_asked_for_again(service: FakeService, session: Session, gap: m.Text | m.Finished) -> None:
    stream = submit(session)
    service.accept("a")
    service.say("follow", m.Text([row("a", 0, 5, text="x")]))
    service.say("follow", gap)
    service.hear(m.Follow, where=has_entry("a", 1, True))
    service.say("follow", m.Text([row("a", 1, 6, 7, text="yz", text_offset=1)]))
    service.say("follow", m.Finished("a", 3, 3, b"", "", None, "stop", {}))
    assert (stream.result(10).token_ids, stream.result().text) == ([5, 6, 7], "xyz")


def test_an_offset_of_text_that_can_never_fit_fails_the_request(service: FakeService, session: Session) -> None:
    """A caller that resumes with a wrong count of characters is told so, instead of asking for ever."""
    stream = Stream("a", session.abort)
    session.resume("a", stream, num_tokens=2, num_chars=0)
    service.hear(m.Follow)
    service.say("follow", m.Text([row("a", 2, 7, text="z", text_offset=2)]))
    with pytest.raises(InvalidRequest, match="the first 2 tokens have 2 characters, not 0"):
        stream.result(10)


def test_a_request_is_followed_again_and_again_to_keep_its_lease(service: FakeService, session: Session) -> None:
    submit(session)
    service.accept("a")
    service.say("follow", m.Text([row("a", 0, 5, text="x")]))
    for _ in range(3):
        service.hear(m.Follow, where=has_entry("a", 1, False))


def test_many_tokens_are_acknowledged_at_once(
    service: FakeService, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "REPEAT_S", 60.0)
    submit(session)
    service.accept("a")
    service.say("follow", m.Text([row("a", 0, *range(ACKNOWLEDGE_TOKENS - 1))]))
    service.say("follow", m.Text([row("a", ACKNOWLEDGE_TOKENS - 1, 5)]))
    service.hear(m.Follow, where=has_entry("a", ACKNOWLEDGE_TOKENS, False))


def test_an_end_is_acknowledged(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    service.say("follow", finished("a"))
    assert service.hear(m.Acknowledge) == m.Acknowledge(["a"])
    stream.result(10)


def test_an_end_that_comes_twice_is_acknowledged_twice_and_told_once(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    service.say("follow", finished("a", text="first"))
    service.hear(m.Acknowledge)
    service.say("follow", finished("a", text="second"))
    assert service.hear(m.Acknowledge) == m.Acknowledge(["a"])
    assert stream.result(10).text == "first"


def test_nothing_is_said_about_a_request_that_ended(service: FakeService, session: Session) -> None:
    submit(session)
    service.accept("a")
    service.say("follow", finished("a"))
    service.hear(m.Acknowledge)
    assert service.hear_any(5 * REPEAT_S) is None


def test_a_failure_is_raised_with_what_came_before_it(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    service.say("follow", m.Text([row("a", 0, 5, text="x")]))
    service.say("follow", m.Failed("a", 1, 1, packed(6), "y", None, "model_failed", "not a number", {}))
    with pytest.raises(ModelFailed, match="not a number") as caught:
        stream.result(10)
    assert (caught.value.partial.token_ids, caught.value.partial.text) == ([5, 6], "xy")
    assert caught.value.partial.finish_reason == "error"


def test_a_failure_is_acknowledged(service: FakeService, session: Session) -> None:
    submit(session)
    service.accept("a")
    service.say("follow", failed("a", "poisoned", "it killed execute twice"))
    assert service.hear(m.Acknowledge) == m.Acknowledge(["a"])


def test_a_resumed_request_is_followed_from_where_it_was(service: FakeService, session: Session) -> None:
    stream = Stream("a", session.abort)
    session.resume("a", stream, num_tokens=2, num_chars=3)
    service.hear(m.Follow, where=has_entry("a", 2, True))
    service.say("follow", m.Finished("a", 0, 0, packed(5, 6, 7), "abcd", None, "stop", {}))
    assert (stream.result(10).token_ids, stream.result().text) == ([7], "d")


def test_resuming_what_nobody_knows_is_an_error(service: FakeService, session: Session) -> None:
    stream = Stream("a", session.abort)
    session.resume("a", stream, num_tokens=0, num_chars=0)
    service.hear(m.Follow)
    service.say("follow", failed("a", "unknown_id", "no request 'a' is live or kept"))
    with pytest.raises(UnknownRequest):
        stream.result(10)


# -- requests that are let go


def test_the_end_of_what_was_let_go_is_left_for_who_comes_for_it(service: FakeService, session: Session) -> None:
    submit(session)
    service.accept("a")
    session.let_go("a")
    service.settle(session)
    service.say("follow", finished("a", 0, 5, text="x"))
    service.settle(session)
    assert m.Acknowledge(["a"]) not in service.heard
    stream = Stream("a", session.abort)
    session.resume("a", stream, num_tokens=0, num_chars=0)
    service.hear(m.Follow, where=has_entry("a", 0, True))
    service.say("follow", finished("a", 0, 5, text="x"))
    assert stream.result(10).text == "x"
    assert service.hear(m.Acknowledge) == m.Acknowledge(["a"])


def test_an_end_that_is_kept_stays_kept_when_it_comes_again(service: FakeService, session: Session) -> None:
    stream = Stream("a", session.abort)
    session.submit("a", {"prompt": "hello"}, stream, keep=True)
    service.accept("a")
    for _ in range(2):
        service.say("follow", finished("a", 0, 5, text="x"))
        service.settle(session)
    assert stream.result(10).text == "x"
    assert m.Acknowledge(["a"]) not in service.heard


def test_an_id_that_is_used_again_and_let_go_is_not_acknowledged(service: FakeService, session: Session) -> None:
    submit(session)
    service.accept("a")
    service.say("follow", finished("a"))
    service.hear(m.Acknowledge)
    submit(session)
    service.accept("a")
    session.let_go("a")
    service.settle(session)
    service.say("follow", finished("a"))
    service.settle(session)
    assert service.heard.count(m.Acknowledge(["a"])) == 1


def test_what_is_said_of_a_request_before_it_is_accepted_once_more_is_asked_for_again(
    service: FakeService, session: Session
) -> None:
    """It is let go and submitted again: who follows is known to summarize, while prepare may be slow."""
    first = submit(session)
    service.accept("a")
    first.accepted(10)
    session.let_go("a")
    stream = submit(session)
    service.say("follow", m.Text([row("a", 0, 5, text="x")]))
    service.say("follow", finished("a", 0, 5, 6, text="xy"))
    service.settle(session)
    assert not stream.done
    assert m.Acknowledge(["a"]) not in service.heard
    service.hear(m.Submit, where=lambda said: said.request_id == "a")
    service.say("submit", m.Accepted("a", 1, 0, 16))
    service.hear(m.Follow, where=has_entry("a", 0, True))
    service.say("follow", finished("a", 0, 5, 6, text="xy"))
    assert (stream.accepted(10).request_id, stream.result(10).token_ids) == ("a", [5, 6])


def test_what_is_let_go_before_it_is_accepted_is_said_until_it_is_and_not_aborted(
    service: FakeService, session: Session
) -> None:
    submit(session)
    service.hear(m.Submit)
    session.let_go("a")
    service.settle(session)
    service.hear(m.Submit, where=lambda said: said.request_id == "a")
    service.say("submit", m.Accepted("a", 1, 0, 16))
    service.settle(session)
    assert {said.request_id for said in service.heard if isinstance(said, m.Submit)} == {"a", "last"}
    assert m.Abort("a") not in service.heard
    assert {entry[0] for said in service.heard if isinstance(said, m.Follow) for entry in said.entries} == {"last"}


def test_what_is_let_go_before_it_is_accepted_may_be_resumed(service: FakeService, session: Session) -> None:
    submit(session)
    service.hear(m.Submit)
    session.let_go("a")
    stream = Stream("a", session.abort)
    session.resume("a", stream, num_tokens=0, num_chars=0)
    service.accept("a")
    service.say("follow", finished("a", 0, 5, text="x"))
    assert stream.result(10).text == "x"


def test_the_choices_of_what_is_let_go_before_it_is_accepted_are_not_followed(
    service: FakeService, session: Session
) -> None:
    group = GroupStream("a", 2, session.abort)
    session.submit("a", {"prompt": "hello", "n": 2}, group, group.choices)
    service.hear(m.Submit)
    session.let_go("a", PipelineClosed("enough"))
    with pytest.raises(PipelineClosed, match="enough"):
        group.choices[1].result(10)
    service.say("submit", m.Accepted("a", 1, 0, 16))
    service.settle(session)
    assert {entry[0] for said in service.heard if isinstance(said, m.Follow) for entry in said.entries} == {"last"}
    assert not any(isinstance(said, m.Abort) for said in service.heard)


# -- aborts


def test_an_abort_is_said_again_until_the_end_comes(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    stream.abort()
    assert [service.hear(m.Abort) for _ in range(3)] == [m.Abort("a")] * 3
    service.say("follow", finished("a", 0, 5, text="x", reason="abort"))
    assert (stream.result(10).finish_reason, stream.result().text) == ("abort", "x")


def test_an_abort_before_the_acceptance_is_said_after_it(service: FakeService, session: Session) -> None:
    stream = submit(session)
    stream.abort()
    service.hear(m.Submit)
    service.hear(m.Submit)
    service.say("submit", m.Accepted("a", 1, 0, 16))
    assert service.hear(m.Abort) == m.Abort("a")


def test_an_abort_of_something_unknown_says_nothing(service: FakeService, session: Session) -> None:
    session.abort("never heard of")
    assert service.hear_any(3 * REPEAT_S) is None


# -- listeners


class Broken(Stream):
    """A caller whose callbacks raise."""

    def on_accepted(self, accepted: m.Accepted) -> None:
        raise RuntimeError("accepted")

    def on_delta(self, delta: Any) -> None:
        raise RuntimeError("delta")


def test_a_listener_that_raises_stops_nobody(service: FakeService, session: Session) -> None:
    broken = Broken("broken", session.abort)
    session.submit("broken", {"prompt": "x"}, broken)
    service.accept("broken")
    other = submit(session, "other")
    service.accept("other")
    for name in ("broken", "other"):
        service.say("follow", m.Text([row(name, 0, 5, text="x")]))
        service.say("follow", m.Finished(name, 1, 1, b"", "", None, "stop", {}))
    assert other.result(10).text == "x"
    assert broken.result(10).text == "x"
