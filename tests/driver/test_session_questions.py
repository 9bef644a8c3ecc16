"""Questions of a client: what the service is, how it is, and how a request stands."""

from __future__ import annotations

import threading

import pytest

from tests.driver.fake_service import FakeService
from triptych.driver.session import Session
from triptych.protocol import messages as m
from triptych.protocol.errors import Draining

pytestmark = pytest.mark.usefixtures("impatient")


def test_a_question_is_asked_again_until_it_is_answered(service: FakeService, session: Session) -> None:
    future = session.ask(m.GetInfo())
    for _ in range(3):
        service.hear(m.GetInfo)
    service.say("submit", m.Info({"model": "m"}))
    assert future.result(10) == m.Info({"model": "m"})


def test_one_answer_is_for_all_who_asked(service: FakeService, session: Session) -> None:
    futures = [session.ask(m.GetStats()) for _ in range(3)]
    service.hear(m.GetStats)
    service.say("follow", m.Stats({"a": 1}))
    assert [future.result(10) for future in futures] == [m.Stats({"a": 1})] * 3


def test_the_status_of_each_request_is_a_question_of_its_own(service: FakeService, session: Session) -> None:
    futures = {name: session.ask(m.GetStatus(name)) for name in "ab"}
    for name in "ba":
        service.hear(m.GetStatus, where=lambda status, name=name: status.request_id == name)  # type: ignore[misc]
        service.say("follow", m.Status(name, "running", 3, 1, 0))
    assert {name: future.result(10).request_id for name, future in futures.items()} == {"a": "a", "b": "b"}


def test_lists_of_two_lengths_are_two_questions(service: FakeService, session: Session) -> None:
    futures = {limit: session.ask(m.GetRequests(limit)) for limit in (1, 2)}
    for limit in (2, 1):
        service.hear(m.GetRequests, where=lambda asked, limit=limit: asked.limit == limit)  # type: ignore[misc]
        service.say("follow", m.Requests(limit, [], 0, 7, []))
    assert {limit: future.result(10).limit for limit, future in futures.items()} == {1: 1, 2: 2}


def test_nobody_waits_for_an_answer_that_was_given_up(service: FakeService, session: Session) -> None:
    future = session.ask(m.GetInfo())
    service.hear(m.GetInfo)
    assert future.cancel()
    service.say("submit", m.Info({}))
    again = session.ask(m.GetInfo())
    service.hear(m.GetInfo)
    service.say("submit", m.Info({"second": 2}))
    assert again.result(10).info in ({}, {"second": 2})


def test_a_question_that_was_given_up_before_it_was_asked_ends_no_session(session: Session) -> None:
    held = threading.Event()
    session._order(lambda: held.wait(10))
    session.fail(Draining("the service will not come back"))
    assert session.ask(m.GetStats()).cancel()
    later = session.ask(m.GetStats())
    held.set()
    with pytest.raises(Draining):
        later.result(10)
    with pytest.raises(Draining):
        session.ask(m.GetStats()).result(10)
