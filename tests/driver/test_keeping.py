"""Answers that are kept by the service while readers come and go."""

from __future__ import annotations

import asyncio

import pytest

from tests.driver.fake_service import FakeService, finished, row
from triptych.driver.async_stream import Mailbox
from triptych.driver.choices import GroupStream, choice_ids
from triptych.driver.session import Session
from triptych.driver.stream import MAX_MISPLACED, Assembly, Stream
from triptych.protocol import messages as m
from triptych.protocol.errors import DuplicateId, InvalidRequest


def test_end_of_a_kept_answer_is_not_acknowledged_until_it_is_forgotten(service: FakeService, session: Session) -> None:
    streams = {name: Stream(name, session) for name in ("kept", "plain")}
    for name, stream in streams.items():
        session.submit(name, {"prompt": "hi"}, stream, keep=name == "kept")
        service.accept(name)
        service.send("follow", finished(name, 0, 1, text="a"))
        assert stream.result(10).text == "a"
    assert service.recv(m.Acknowledge).request_ids == ["plain"]
    session.forget("kept")
    assert service.recv(m.Acknowledge).request_ids == ["kept"]


def test_detached_request_is_neither_followed_nor_aborted(service: FakeService, session: Session) -> None:
    stream, other = Stream("a", session), Stream("b", session)
    session.submit("a", {"prompt": "hi"}, stream)
    service.accept("a")
    session.submit("b", {"prompt": "hi"}, other)
    service.accept("b")
    session.detach("a", DuplicateId("somebody else reads"))
    with pytest.raises(DuplicateId):
        stream.result(10)
    follow = service.recv(m.Follow, where=lambda follow: all(entry[0] != "a" for entry in follow.entries))
    assert [entry[0] for entry in follow.entries] == ["b"]


def test_late_detach_by_an_earlier_reader_does_not_disturb_the_next_one(service: FakeService, session: Session) -> None:
    """A broken connection is noticed after its client has come back on another one."""
    early, late = Stream("a", session), Stream("a", session)
    session.submit("a", {"prompt": "hi"}, early, keep=True)
    service.accept("a")
    session.detach("a", DuplicateId("somebody else reads"))
    session.resume("a", late, num_tokens=0, num_chars=0, keep=True)
    session.detach("a", reader=early)
    assert service.recv(m.Follow, where=lambda follow: follow.entries[0][2]).entries == [["a", 0, True]]
    service.send("follow", finished("a", 0, 1, text="a"))
    assert late.result(10).text == "a"


def test_reader_of_all_choices_or_of_one_can_detach(service: FakeService, session: Session) -> None:
    streams = [GroupStream(name, 2, session) for name in ("a", "b")]
    for name, stream in zip("ab", streams, strict=True):
        session.submit(name, {"prompt": "hi", "n": 2}, stream, stream.choices)
        service.recv(m.Submit)
        service.send("submit", m.Accepted(name, 1, 0, 16))
        stream.accepted(10)
    session.detach("a", reader=streams[1])  # belongs to another reader
    session.detach("b", reader=streams[1])
    last = choice_ids("a", 2)[1]
    session.detach(last, reader=streams[0].choices[1])
    left = choice_ids("a", 2)[0]
    follow = service.recv(m.Follow, where=lambda follow: len(follow.entries) == 1)
    assert [entry[0] for entry in follow.entries] == [left]


@pytest.mark.usefixtures("fast_repeats")
def test_choices_of_a_request_that_is_not_accepted_yet_are_followed_once_it_is(
    service: FakeService, session: Session
) -> None:
    """Before that, the service knows neither them nor the request. Its reader left and came back meanwhile."""
    early, late = (GroupStream("a", 2, session) for _ in range(2))
    session.submit("a", {"prompt": "hi", "n": 2}, early, early.choices)
    service.recv(m.Submit)
    session.detach("a")
    session.resume_all("a", late, late.choices)
    for _ in range(2):
        service.recv(m.Submit)
    assert not any(isinstance(message, m.Follow) for message in service.received)
    service.send("submit", m.Accepted("a", 1, 0, 16))
    assert len(service.recv(m.Follow).entries) == 2
    for choice in choice_ids("a", 2):
        service.send("follow", finished(choice, 0, 1, text=choice))
    assert [choice.text for choice in late.result(10).choices] == choice_ids("a", 2)


def test_reader_that_only_knows_the_token_count_learns_the_character_count() -> None:
    assembly = Assembly("a", num_tokens=2, num_chars=None)
    _, offset, text_offset, ids, text, *_ = row("a", 2, 7, 8, text="cd", text_offset=5)
    delta = assembly.add(offset, text_offset, ids, text, None)
    assert delta is not None
    assert (delta.text, delta.num_tokens, delta.num_chars) == ("cd", 4, 7)


def test_reader_that_has_every_token_gets_the_final_text_too() -> None:
    assembly = Assembly("a", num_tokens=2, num_chars=None)
    assert assembly.add(2, 5, b"", "\ufffd", None) is None
    assert assembly.num_chars == 6


def test_reader_that_claims_too_many_tokens_gets_an_error() -> None:
    assembly = Assembly("a", num_tokens=9, num_chars=None)
    for _ in range(MAX_MISPLACED):
        with pytest.raises(LookupError):
            assembly.add(3, 3, b"", "", None)
    with pytest.raises(InvalidRequest, match="3 tokens so far, 9"):
        assembly.add(3, 3, b"", "", None)


def test_event_loop_may_be_closed_at_any_moment() -> None:
    """By its thread, even while a callback is put: that is no error of the listener, to be logged."""
    loop = asyncio.new_event_loop()
    wake = loop.call_soon_threadsafe

    def close_and_wake(*arguments: object) -> object:
        loop.close()
        return wake(*arguments)  # type: ignore[arg-type]

    loop.call_soon_threadsafe = close_and_wake  # type: ignore[assignment,method-assign]
    Mailbox(loop).put(print)


def test_many_callbacks_wake_the_event_loop_once() -> None:
    async def scenario() -> tuple[list[int], int]:
        loop, seen, wakes = asyncio.get_running_loop(), list[int](), 0
        mailbox, wake = Mailbox(loop), loop.call_soon_threadsafe

        def counted(*arguments: object) -> object:
            nonlocal wakes
            wakes += 1
            return wake(*arguments)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counted  # type: ignore[assignment,method-assign]
        for number in range(100):
            mailbox.put(seen.append, number)
        await asyncio.sleep(0)
        mailbox.put(seen.append, 100)
        await asyncio.sleep(0)
        return seen, wakes

    assert asyncio.run(scenario()) == (list(range(101)), 2)


@pytest.mark.parametrize("aborted", ["a", choice_ids("a", 2)[1]], ids=["all", "choice"])
def test_abort_before_the_acceptance_counts_for_the_next_reader_of_choices_too(
    service: FakeService, session: Session, aborted: str
) -> None:
    early, late = (GroupStream("a", 2, session) for _ in range(2))
    session.submit("a", {"prompt": "hi", "n": 2}, early, early.choices)
    session.detach("a")
    session.abort(aborted)
    session.resume_all("a", late, late.choices)
    service.recv(m.Submit)
    service.send("submit", m.Accepted("a", 1, 0, 16))
    assert service.recv(m.Abort, timeout=2).request_id == (choice_ids("a", 2)[0] if aborted == "a" else aborted)


def test_abort_before_the_acceptance_counts_for_the_next_reader_too(service: FakeService, session: Session) -> None:
    session.submit("a", {"prompt": "hi"}, Stream("a", session))
    session.detach("a")
    session.abort("a")
    late = Stream("a", session)
    session.resume("a", late, num_tokens=0, num_chars=0)
    service.recv(m.Submit)
    service.send("submit", m.Accepted("a", 1, 0, 16))
    assert service.recv(m.Abort, timeout=2).request_id == "a"
