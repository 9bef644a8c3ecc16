"""When servers or clients go away, open requests are resumed or ended, and the last messages are sent."""

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
from triptych.protocol.errors import ConfigError, PipelineClosed, PipelineFailed

pytestmark = pytest.mark.usefixtures("fast_repeats")


def test_messages_for_an_absent_server_are_sent_when_it_is_back(service: FakeService, session: Session) -> None:
    service.close_socket("submit")
    stream = submit(session)
    assert service.recv_any(5 * REPEAT_S) is None
    service.open_socket("submit")
    service.accept("a")
    service.send("follow", finished("a", text="x"))
    assert stream.result(10).text == "x"


def test_restarted_summarize_is_followed_again(service: FakeService, session: Session) -> None:
    stream = submit(session)
    service.accept("a")
    service.send("follow", m.Text([row("a", 0, 5, text="x")]))
    service.recv(m.Follow, where=has_entry("a", 1, False))
    service.close_socket("follow")
    service.open_socket("follow")
    service.recv(m.Follow, where=has_entry("a", 1, False))
    service.send("follow", m.Finished("a", 1, 1, packed(6), "y", None, "stop", {}))
    assert stream.result(10).text == "xy"


def test_idle_client_sends_nothing(service: FakeService, session: Session) -> None:
    assert service.recv_any(5 * REPEAT_S) is None


def test_client_can_be_closed_by_a_callback_of_its_own(
    service: FakeService, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    stream = submit(session)
    stream.on_done(session.close)
    service.accept("a")
    service.send("follow", finished("a", text="x"))
    session._thread.join(10)
    assert not session._thread.is_alive()
    assert stream.result(0).text == "x"
    assert caplog.messages == []


def test_closing_ends_open_requests(service: FakeService, session: Session) -> None:
    streams = [submit(session, name) for name in "ab"]
    question = session.ask(m.GetInfo())
    service.accept("a")
    service.send("follow", m.Text([row("a", 0, 5, text="x")]))
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
def test_request_submitted_just_before_the_close_ends_too(service: FakeService, turn: int) -> None:
    session = service.client()
    stream, question = submit(session, f"{turn}"), session.ask(m.GetInfo())
    session.close()
    with pytest.raises(PipelineClosed):
        stream.result(10)
    with pytest.raises(PipelineClosed):
        question.result(10)


def test_abort_just_before_the_close_is_sent(service: FakeService) -> None:
    """Without the ABORT, the request would run until its lease ends."""
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
    assert service.recv(m.Abort).request_id == "a"


@pytest.mark.parametrize("n", [1, 2])
def test_request_aborted_before_its_acceptance_is_aborted_though_its_client_closes(
    service: FakeService, n: int
) -> None:
    session = service.client()
    names = ["a"] if n == 1 else choice_ids("a", n)
    if n == 1:
        submit(session).abort()
    else:
        choices = [Stream(name, session) for name in names]
        session.submit("a", {"prompt": "hello", "n": n}, Stream("a", session), choices)
        for choice in choices:
            choice.abort()
    service.recv(m.Submit)
    close = threading.Thread(target=session.close)
    close.start()
    eventually(lambda: session._closing)
    service.send("submit", m.Accepted("a", 1, 0, 16))
    assert {service.recv(m.Abort).request_id for _ in names} == set(names)
    close.join()
    assert sum(isinstance(message, m.Submit) for message in service.received) == 1


def test_absent_service_does_not_delay_a_close_for_long(service: FakeService) -> None:
    session = service.client()
    submit(session).abort()
    service.recv(m.Submit)
    service.close_socket("submit")
    began = time.monotonic()
    session.close()
    assert time.monotonic() - began < 2 * LAST_ABORTS_S


def test_end_received_just_before_the_close_is_acknowledged(service: FakeService) -> None:
    session = service.client()

    def wait_for_the_close() -> None:
        eventually(lambda: session._closing)

    stream = submit(session)
    service.accept("a")
    stream.on_done(wait_for_the_close)
    service.send("follow", finished("a"))
    stream.result(10)
    session.close()
    assert service.recv(m.Acknowledge).request_ids == ["a"]


def test_closing_client_submits_nothing(service: FakeService) -> None:
    session, begin = service.client(), threading.Event()
    session._order(begin.wait)
    submit(session, "late")
    close = threading.Thread(target=session.close)
    close.start()
    eventually(lambda: session._closing)
    begin.set()
    close.join()
    assert service.recv_any(0.1) is None


def test_closed_client_refuses_everything(service: FakeService) -> None:
    session = service.client()
    session.close()
    session.close()
    with pytest.raises(PipelineClosed, match="the client is closed"):
        submit(session)


def test_requests_of_many_threads_end_during_a_close(service: FakeService) -> None:
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


def test_question_to_a_service_that_gave_up_is_an_error(service: FakeService, session: Session) -> None:
    """A caller that was about to ask when the service gave up would otherwise wait for ever."""
    before = submit(session, "before")
    session.fail(PipelineFailed("it died again and again"))
    with pytest.raises(PipelineFailed):
        before.result(10)
    with pytest.raises(PipelineFailed, match="it died again and again"):
        submit(session, "after").result(10)
    with pytest.raises(PipelineFailed):
        session.ask(m.GetStats()).result(10)


def test_close_does_not_wait_for_a_server(service: FakeService, session: Session) -> None:
    for socket in ("submit", "follow"):
        service.close_socket(socket)
    submit(session)
    started = time.monotonic()
    session.close()
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("error", "raised"),
    [(RuntimeError, ConfigError), (KeyboardInterrupt, KeyboardInterrupt)],
    ids=["none left", "signal"],
)
def test_client_whose_thread_could_not_start_leaves_no_socket(
    service: FakeService, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], raised: type[BaseException]
) -> None:
    """There are no threads left, or a signal came while it started."""
    start, num_open = threading.Thread.start, len(os.listdir("/proc/self/fd"))

    def fail(thread: threading.Thread) -> None:
        if error is KeyboardInterrupt:
            start(thread)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(raised):
            service.client()
    eventually(lambda: len(os.listdir("/proc/self/fd")) == num_open)


def test_client_that_can_never_connect_fails_and_one_that_is_connected_goes_on(
    service: FakeService, session: Session
) -> None:
    deleted = PipelineClosed("the run directory was deleted")
    stream = submit(session)
    service.accept("a")
    service.recv(m.Follow)
    service.close_socket("follow")
    session.fail_unless_connected(deleted)
    late = service.client()
    late.fail_unless_connected(deleted)
    with pytest.raises(PipelineClosed, match="was deleted"):
        submit(late, "b").result(10)
    late.close()
    service.open_socket("follow")
    service.recv(m.Follow)
    service.send("follow", finished("a", text="x"))
    assert stream.result(10).text == "x"


def test_connection_counts_as_such_before_anything_was_sent(service: FakeService) -> None:
    connection = service.connection()
    eventually(lambda: connection.has_connected)
    connection.close()


def test_pipeline_that_ends_does_not_mind_a_closed_client(session: Session) -> None:
    session.close()
    session.fail(PipelineFailed("it died again and again"))
    session.fail_unless_connected(PipelineClosed("the run directory was deleted"))
