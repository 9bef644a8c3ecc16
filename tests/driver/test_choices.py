"""A request with several choices, seen by its client."""

from __future__ import annotations

import gc
import weakref

import pytest

from tests.driver.fake_service import FakeService, failed, finished, packed, row
from tests.waiting import eventually
from triptych.driver.choices import GroupStream, combine, num_choices
from triptych.driver.session import Session
from triptych.driver.stream import Completion
from triptych.protocol import messages as m
from triptych.protocol.errors import DuplicateId, InvalidRequest, ModelFailed, PipelineClosed


def submit(session: Session, n: int = 2) -> GroupStream:
    stream = GroupStream("a", n, session)
    session.submit("a", {"prompt": "hello", "n": n}, stream, stream.choices)
    return stream


def accept(service: FakeService, n: int = 2) -> None:
    """Accept the request, and wait until each of its choices is followed."""
    service.recv(m.Submit)
    service.send("submit", m.Accepted("a", 1, 0, 16))
    followed: set[str] = set()
    while len(followed) < n:
        followed |= {entry[0] for entry in service.recv(m.Follow).entries}
    assert followed == {f"a {index}" for index in range(n)}


def test_each_choice_of_a_submit_is_followed(service: FakeService, session: Session) -> None:
    stream = submit(session)
    accept(service)
    service.send("follow", m.Text([row("a 1", 0, 7, text="x"), row("a 0", 0, 8, text="y")]))
    service.send("follow", m.Finished("a 0", 1, 1, packed(9), "", None, "stop", {"usage": {}}))
    assert stream.choices[0].result(10).token_ids == [8, 9]
    assert (stream.done, stream.num_tokens) == (False, 3)
    service.send("follow", finished("a 1", 1))
    whole = stream.result(10)
    assert [choice.token_ids for choice in whole.choices] == [[8, 9], [7]]
    assert (whole.request_id, whole.token_ids) == ("a", [8, 9])
    assert [(delta.index, delta.token_ids) for delta in stream] == [(1, [7]), (0, [8]), (0, [9])]


def test_choices_of_an_answered_request_are_freed_at_once(service: FakeService, session: Session) -> None:
    """A search for garbage is so rare in a gateway that thousands would wait for it, with all their text."""
    stream = submit(session)
    accept(service)
    service.send("follow", finished("a 0"))
    service.send("follow", finished("a 1"))
    stream.result(10)
    gc.disable()
    try:
        choice = weakref.ref(stream.choices[0])
        del stream
        eventually(lambda: choice() is None)
    finally:
        gc.enable()


def test_refusal_ends_every_choice(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.recv(m.Submit)
    service.send("submit", m.Rejected("a", "invalid_request", "n is 2, the limit is max_live, 1", "n"))
    for part in (stream, *stream.choices):
        with pytest.raises(InvalidRequest, match="the limit is max_live"):
            part.result(10)


def test_abort_of_the_request_reaches_every_choice_and_of_a_choice_only_that(
    service: FakeService, session: Session
) -> None:
    stream = submit(session, 3)
    stream.choices[1].abort()  # before it is accepted
    accept(service, 3)
    assert service.recv(m.Abort).request_id == "a 1"
    stream.abort()
    received = {service.recv(m.Abort).request_id for _ in range(9)}
    assert received == {"a 0", "a 1", "a 2"}
    for index in range(3):
        service.send("follow", finished(f"a {index}", reason="abort"))
    assert [choice.finish_reason for choice in stream.result(10).choices] == ["abort"] * 3


def test_second_reader_with_another_number_of_choices_changes_nothing(service: FakeService, session: Session) -> None:
    stream, other = submit(session, 3), GroupStream("a", 2, session)
    accept(service, 3)
    session.resume_all("a", other, other.choices)
    with pytest.raises(DuplicateId):
        other.result(10)
    stream.abort()
    assert {service.recv(m.Abort).request_id for _ in range(9)} == {"a 0", "a 1", "a 2"}


def test_repeated_acceptance_changes_nothing(service: FakeService, session: Session) -> None:
    stream = submit(session)
    accept(service)
    service.send("submit", m.Accepted("a", 1, 0, 16))
    service.send("follow", finished("a 0", 0, 4))
    service.send("follow", finished("a 1", 0, 5))
    assert [choice.token_ids for choice in stream.result(10).choices] == [[4], [5]]


@pytest.mark.parametrize("fails_first", [False, True])
def test_failed_choice_is_raised_with_the_answers_of_the_others(
    service: FakeService, session: Session, fails_first: bool
) -> None:
    stream = submit(session)
    accept(service)
    ends = [finished("a 1", 0, 5), failed("a 0", "model_failed", "not a number")]
    for end in reversed(ends) if fails_first else ends:
        service.send("follow", end)
    with pytest.raises(ModelFailed) as caught:
        stream.result(10)
    whole = caught.value.partial
    assert (whole.request_id, [choice.token_ids for choice in whole.choices]) == ("a", [[], [5]])
    with pytest.raises(ModelFailed) as of_choice:
        stream.choices[0].result(10)
    assert of_choice.value.partial.request_id == "a 0"
    assert stream.choices[1].result(10).token_ids == [5]


def test_id_of_a_live_group_is_taken(service: FakeService, session: Session) -> None:
    stream = submit(session)
    accept(service)
    with pytest.raises(InvalidRequest, match="already has a live request 'a'"):
        submit(session).result(10)
    for index in range(2):
        service.send("follow", finished(f"a {index}"))
    stream.wait(60)
    eventually(lambda: not session._exchange.choices)


def test_closing_the_client_ends_every_choice(service: FakeService) -> None:
    session = service.client()
    stream = submit(session)
    session.close()
    for part in (stream, *stream.choices):
        with pytest.raises(PipelineClosed):
            part.result(10)


def test_callback_of_a_choice_that_raises_does_not_stop_later_callbacks(service: FakeService, session: Session) -> None:
    stream = submit(session)
    reported: list[str] = []
    stream.choices[1].on_done(lambda: [][0])
    stream.choices[1].on_done(lambda: reported.append("after one that raised"))
    accept(service)
    for index in range(2):
        service.send("follow", finished(f"a {index}"))
    assert stream.result(10).finish_reason == "stop"
    assert reported == ["after one that raised"]


def test_usage_counts_the_prompt_of_several_choices_once() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0, "truncated_tokens": 0}
    parts = [Completion(f"a {i}", f"x{i}", [i], "stop", None, {"usage": usage, "index": i}) for i in range(3)]
    whole = combine("a", parts)
    assert (whole.text, whole.token_ids) == ("x0", [0])
    assert whole.usage == {**usage, "completion_tokens": 9}
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert parts[1].choices == [parts[1]]


@pytest.mark.parametrize(("n", "count"), [(1, 1), (2, 2), (64, 64), (65, 1), (10**9, 1), (0, 1), (True, 1), ("3", 1)])
def test_only_a_valid_n_makes_choices(n: object, count: int) -> None:
    """The service refuses the others, so no one waits for their choices."""
    assert num_choices({"n": n}) == count
