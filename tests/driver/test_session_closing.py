"""Servers and clients that go away: what is open is taken up again, or ends, and what was said last is heard."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tests.driver.fake_service import REPEAT_S, FakeService, finished, has_entry, packed, row, submit
from tests.waiting import eventually
from triptych.driver.choices import choice_ids
from triptych.driver.session import LAST_ABORTS_S, Session
from triptych.driver.stream import Stream
from triptych.protocol import messages as m
from triptych.protocol.errors import PipelineClosed, PipelineFailed

pytestmark = pytest.mark.usefixtures("impatient")


def test_a_server_that_was_away_hears_everything_then(service: FakeService, session: Session) -> None:
    service.shut("submit")
    stream = submit(session)
    assert service.hear_any(5 * REPEAT_S) is None
    service.open("submit")
    service.accept("a")
    service.say("follow", finished("a", text="x"))
    assert stream.result(10).text == "x"


def test_a_summarize_that_comes_back_is_followed_again(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    service.say("follow", m.Text([row("a", 0, 5, text="x")]))
    service.hear(m.Follow, where=has_entry("a", 1, False))
    service.shut("follow")
    service.open("follow")
    service.hear(m.Follow, where=has_entry("a", 1, False))
    service.say("follow", m.Finished("a", 1, 1, packed(6), "y", None, "stop", {}))
    assert stream.result(10).text == "xy"


def test_an_idle_client_says_nothing(service: FakeService, session: Session) -> None:
    assert service.hear_any(5 * REPEAT_S) is None


def test_closing_ends_what_is_open(service: FakeService, session: Session) -> None:
    streams = [submit(session, name) for name in "ab"]
    question = session.ask(m.GetInfo())
    service.accept("a")
    service.say("follow", m.Text([row("a", 0, 5, text="x")]))
    next(iter(streams[0]))
    session.close()
    for stream in streams:
        with pytest.raises(PipelineClosed, match="closed before the answer came"):
            stream.result(10)
    with pytest.raises(PipelineClosed):
        question.result(10)
    with pytest.raises(PipelineClosed) as caught:
        streams[0].result()
    assert caught.value.partial.text == "x"


@pytest.mark.parametrize("turn", range(10))
def test_a_request_given_just_before_the_close_ends_too(service: FakeService, turn: int) -> None:
    session = service.client()
    stream, question = submit(session, f"{turn}"), session.ask(m.GetInfo())
    session.close()
    with pytest.raises(PipelineClosed):
        stream.result(10)
    with pytest.raises(PipelineClosed):
        question.result(10)


def test_what_is_asked_just_before_the_close_is_said(service: FakeService) -> None:
    """Without its ABORT a request would go on until its lease ends."""
    session, begin = service.client(), threading.Event()
    stream = submit(session)
    service.accept("a")
    session._order(begin.wait)
    stream.abort()
    close = threading.Thread(target=session.close)
    close.start()
    eventually(lambda: session._closing)
    begin.set()
    close.join()
    assert service.hear(m.Abort).request_id == "a"


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_aborted_before_it_is_accepted_is_aborted_though_its_client_closes(
    service: FakeService, n: int
) -> None:
    session = service.client()
    names = ["a"] if n == 1 else choice_ids("a", n)
    if n == 1:
        submit(session).abort()
    else:
        choices = [Stream(name, session.abort) for name in names]
        session.submit("a", {"prompt": "hello", "n": n}, Stream("a", session.abort), choices)
        for choice in choices:
            choice.abort()
    service.hear(m.Submit)
    close = threading.Thread(target=session.close)
    close.start()
    eventually(lambda: session._closing)
    service.say("submit", m.Accepted("a", 1, 0, 16))
    assert {service.hear(m.Abort).request_id for _ in names} == set(names)
    close.join()
    assert sum(isinstance(message, m.Submit) for message in service.heard) == 1


def test_a_service_that_is_away_holds_up_no_close_for_long(service: FakeService) -> None:
    session = service.client()
    submit(session).abort()
    service.hear(m.Submit)
    service.shut("submit")
    began = time.monotonic()
    session.close()
    assert time.monotonic() - began < 2 * LAST_ABORTS_S


def test_an_end_that_came_just_before_the_close_is_acknowledged(service: FakeService) -> None:
    session = service.client()

    def wait_for_the_close() -> None:
        eventually(lambda: session._closing)

    stream = submit(session)
    service.accept("a")
    stream.on_done(wait_for_the_close)
    service.say("follow", finished("a"))
    stream.result(10)
    session.close()
    assert service.hear(m.Acknowledge).request_ids == ["a"]


def test_no_request_is_sent_by_who_closes(service: FakeService) -> None:
    session, begin = service.client(), threading.Event()
    session._order(begin.wait)
    submit(session, "late")
    close = threading.Thread(target=session.close)
    close.start()
    eventually(lambda: session._closing)
    begin.set()
    close.join()
    assert service.hear_any(0.1) is None


def test_a_closed_client_takes_nothing(service: FakeService) -> None:
    session = service.client()
    session.close()
    session.close()
    with pytest.raises(PipelineClosed, match="the client is closed"):
        submit(session)


def test_requests_of_many_threads_and_a_close_all_end(service: FakeService) -> None:
    session = service.client()
    streams: list[Stream] = []

    def give() -> None:
        for number in range(1000):
            try:
                streams.append(submit(session, f"{threading.get_ident()}-{number}"))
            except PipelineClosed:
                return

    threads = [threading.Thread(target=give) for _ in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(streams) > 50, interval=0)
    session.close()
    for thread in threads:
        thread.join()
    eventually(lambda: all(stream.done for stream in streams), timeout=5)


def test_whoever_asks_a_service_that_was_given_up_is_told(service: FakeService, session: Session) -> None:
    """The one who was just about to ask when it was given up would wait for ever."""
    before = submit(session, "before")
    session.fail(PipelineFailed("it died again and again"))
    with pytest.raises(PipelineFailed):
        before.result(10)
    with pytest.raises(PipelineFailed, match="it died again and again"):
        submit(session, "after").result(10)
    with pytest.raises(PipelineFailed):
        session.ask(m.GetStats()).result(10)


def test_a_close_does_not_wait_for_a_server(service: FakeService, session: Session) -> None:
    for door in ("submit", "follow"):
        service.shut(door)
    submit(session)
    started = time.monotonic()
    session.close()
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_client_whose_thread_could_not_begin_leaves_no_socket(
    service: FakeService, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """No thread is left, or a signal came while it began."""
    start, num_open = threading.Thread.start, len(os.listdir("/proc/self/fd"))

    def fail(thread: threading.Thread) -> None:
        if error is KeyboardInterrupt:
            start(thread)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(error):
            service.client()
    eventually(lambda: len(os.listdir("/proc/self/fd")) == num_open)
