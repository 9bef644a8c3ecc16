"""Questions of a client: about the service, its statistics, and the status of requests."""

from __future__ import annotations

import threading

import pytest

from tests.driver.fake_service import REPEAT_S, FakeService
from tests.waiting import eventually
from triptych.driver.session import Session
from triptych.protocol import messages as m
from triptych.protocol.errors import Draining

pytestmark = pytest.mark.usefixtures("fast_repeats")


def test_question_is_repeated_until_it_is_answered(service: FakeService, session: Session) -> None:
    future = session.ask(m.GetInfo())
    for _ in range(3):
        service.recv(m.GetInfo)
    service.send("submit", m.Info({"model": "m"}))
    assert future.result(10) == m.Info({"model": "m"})


def test_one_answer_serves_all_who_asked(service: FakeService, session: Session) -> None:
    futures = [session.ask(m.GetStats()) for _ in range(3)]
    service.recv(m.GetStats)
    service.send("follow", m.Stats({"a": 1}))
    assert [future.result(10) for future in futures] == [m.Stats({"a": 1})] * 3


def test_status_questions_are_separate_for_each_request(service: FakeService, session: Session) -> None:
    futures = {name: session.ask(m.GetStatus(name)) for name in "ab"}
    for name in "ba":
        service.recv(m.GetStatus, where=lambda status, name=name: status.request_id == name)  # type: ignore[misc]
        service.send("follow", m.Status(name, "running", 3, 1, 0))
    assert {name: future.result(10).request_id for name, future in futures.items()} == {"a": "a", "b": "b"}


def test_lists_of_different_lengths_are_different_questions(service: FakeService, session: Session) -> None:
    futures = {limit: session.ask(m.GetRequests(limit)) for limit in (1, 2)}
    for limit in (2, 1):
        service.recv(m.GetRequests, where=lambda asked, limit=limit: asked.limit == limit)  # type: ignore[misc]
        service.send("follow", m.Requests(limit, [], 0, 7, []))
    assert {limit: future.result(10).limit for limit, future in futures.items()} == {1: 1, 2: 2}


def test_late_answer_to_a_timed_out_question_is_ignored(service: FakeService, session: Session) -> None:
    future = session.ask(m.GetInfo())
    service.recv(m.GetInfo)
    assert future.cancel()
    service.send("submit", m.Info({}))
    again = session.ask(m.GetInfo())
    service.recv(m.GetInfo)
    service.send("submit", m.Info({"second": 2}))
    assert again.result(10).info in ({}, {"second": 2})


def test_question_is_neither_repeated_nor_held_once_nobody_waits_for_its_answer(
    service: FakeService, session: Session
) -> None:
    """While the service is silent, a program may ask every second for a day."""
    futures = [session.ask(m.GetStatus(name)) for name in "aab"]
    service.recv(m.GetStatus, where=lambda asked: asked.request_id == "b")
    for future in futures[1:]:
        future.cancel()
    eventually(lambda: [service.recv(m.GetStatus).request_id for _ in range(4)] == ["a"] * 4)
    futures[0].cancel()
    eventually(lambda: service.recv_any(3 * REPEAT_S) is None)
    eventually(lambda: not session._exchange._questions)


def test_question_that_timed_out_before_it_was_sent_does_not_end_the_session(session: Session) -> None:
    held = threading.Event()
    session._order(lambda: held.wait(60))
    session.fail(Draining("the service will not come back"))
    assert session.ask(m.GetStats()).cancel()
    later = session.ask(m.GetStats())
    held.set()
    with pytest.raises(Draining):
        later.result(10)
    with pytest.raises(Draining):
        session.ask(m.GetStats()).result(10)
