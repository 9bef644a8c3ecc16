"""What a caller sees of a request: deltas, the completion at the end, and errors with the answer so far."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from triptych.driver.stream import Completion, Delta, Listener, Stream
from triptych.protocol.errors import ModelFailed, RequestTimeout
from triptych.protocol.messages import Accepted

ACCEPTED = Accepted("a", 3, 0, 16)
DELTAS = [Delta("x", [1], 1), Delta("y", [2], 2)]


class Left:
    """Records who stops to read."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def abort(self, request_id: str, *, reader: Listener | None) -> None:
        self.asked.append(("abort", request_id, reader))

    def detach(self, request_id: str, *, reader: Listener | None) -> None:
        self.asked.append(("detach", request_id, reader))


def make_stream() -> Stream:
    return Stream("a", Left())


def completion(reason: str = "stop") -> Completion:
    return Completion("a", "xy", [1, 2], reason, None, {"usage": {"completion_tokens": 2}, "ledger": {"tps": 1.0}})


def failure() -> ModelFailed:
    error = ModelFailed("not a number")
    error.partial = completion("error")
    return error


def play(stream: Stream, error: ModelFailed | None = None) -> None:
    stream.on_accepted(ACCEPTED)
    for delta in DELTAS:
        stream.on_delta(delta)
    stream.on_end(completion("error" if error else "stop"), error)


def test_completion_that_the_service_did_not_sum_up_has_no_usage() -> None:
    partial = Completion("a", "x", [1], "error", None, {})  # of an error of the client itself
    assert (partial.usage, partial.ledger) == ({}, {})


def test_deltas_are_yielded_until_the_end() -> None:
    stream = make_stream()
    play(stream)
    assert list(stream) == DELTAS


def test_deltas_are_yielded_as_they_arrive() -> None:
    stream = make_stream()
    stream.on_delta(DELTAS[0])
    deltas = iter(stream)
    assert next(deltas) == DELTAS[0]
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(next, deltas)
        stream.on_delta(DELTAS[1])
        assert second.result(10) == DELTAS[1]


def test_iterating_after_the_end_ends_at_once() -> None:
    stream = make_stream()
    play(stream)
    assert (list(stream), list(stream)) == (DELTAS, [])


def test_result_is_available_without_iterating() -> None:
    stream = make_stream()
    play(stream)
    assert (stream.result(), stream.result(), stream.done) == (completion(), completion(), True)


def test_result_has_usage_and_ledger() -> None:
    assert completion().usage == {"completion_tokens": 2}
    assert completion().ledger == {"tps": 1.0}


def test_several_threads_may_wait_for_one_result() -> None:
    stream = make_stream()
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(stream.result) for _ in range(4)]
        play(stream)
        assert [result.result(10) for result in results] == [completion()] * 4


@pytest.mark.parametrize("timeout", [0.0, 0.01])
def test_wait_for_a_result_times_out_and_the_request_continues(timeout: float) -> None:
    stream = make_stream()
    with pytest.raises(RequestTimeout, match=f"request a: no answer within {timeout} s"):
        stream.result(timeout)
    assert not stream.done
    play(stream)
    assert stream.result(timeout) == completion()


def test_wait_for_the_acceptance_times_out() -> None:
    with pytest.raises(RequestTimeout):
        make_stream().accepted(0.01)


def test_acceptance_is_available_before_the_answer() -> None:
    stream = make_stream()
    stream.on_accepted(ACCEPTED)
    assert (stream.accepted(), stream.done) == (ACCEPTED, False)


def test_refusal_is_raised_by_the_wait_for_the_acceptance() -> None:
    stream = make_stream()
    stream.on_end(completion("error"), failure())
    with pytest.raises(ModelFailed):
        stream.accepted()


def test_request_that_failed_later_was_accepted() -> None:
    stream = make_stream()
    play(stream, failure())
    assert stream.accepted() == ACCEPTED


def test_error_comes_after_the_deltas_before_it() -> None:
    stream = make_stream()
    play(stream, failure())
    deltas = iter(stream)
    assert [next(deltas), next(deltas)] == DELTAS
    with pytest.raises(ModelFailed):
        next(deltas)


def test_error_contains_the_answer_so_far() -> None:
    stream = make_stream()
    play(stream, failure())
    with pytest.raises(ModelFailed, match="not a number") as caught:
        stream.result()
    assert caught.value.partial == completion("error")


def test_waiting_does_not_raise_the_error_of_the_request() -> None:
    stream = make_stream()
    play(stream, failure())
    stream.wait()
    assert stream.done


def test_abort_and_detach_name_the_request_and_its_reader() -> None:
    session = Left()
    stream = Stream("the id", session)
    stream.abort()
    stream.detach()
    assert session.asked == [("abort", "the id", stream), ("detach", "the id", stream)]


def test_stream_shows_its_request_and_how_far_it_is() -> None:
    stream = make_stream()
    assert repr(stream) == "<Stream a, sent>"
    stream.on_accepted(ACCEPTED)
    assert repr(stream) == "<Stream a, accepted>"
    stream.on_delta(DELTAS[0])
    assert repr(stream) == "<Stream a, 1 token>"
    stream.on_delta(DELTAS[1])
    stream.on_end(completion(), None)
    assert repr(stream) == "<Stream a, stop after 2 tokens>"


def test_stream_shows_its_error() -> None:
    stream = make_stream()
    play(stream, failure())
    assert repr(stream) == "<Stream a, model_failed after 2 tokens>"


def test_end_wakes_an_iterating_thread() -> None:
    stream = make_stream()
    seen: list[Delta] = []
    reader = threading.Thread(target=lambda: seen.extend(stream))
    reader.start()
    stream.on_end(completion(), None)
    reader.join(10)
    assert (reader.is_alive(), seen) == (False, [])


def test_tokens_are_counted_before_they_are_read() -> None:
    stream = make_stream()
    assert stream.num_tokens == 0
    play(stream)
    assert stream.num_tokens == 2


@pytest.mark.parametrize("error", [None, failure()], ids=["well", "failed"])
def test_end_is_passed_to_every_callback(error: ModelFailed | None) -> None:
    stream, received = make_stream(), []
    stream.on_done(lambda: received.append((stream.done, "before")))
    play(stream, error)
    stream.on_done(lambda: received.append((stream.done, "after")))
    assert received == [(True, "before"), (True, "after")]


def test_deltas_in_a_row_are_joined_as_if_they_had_come_as_one() -> None:
    first = Delta("ab", [1], 1, 5.0, [[-1.0, []]], index=2, num_chars=2)
    second = Delta("", [2, 3], 3, 6.0, [[-2.0, []], [-3.0, []]], index=2, num_chars=2)
    third = Delta("c", [], 3, 7.0, None, index=2, num_chars=3)
    rows = [[-1.0, []], [-2.0, []], [-3.0, []]]
    assert Delta.joined([first, second, third]) == Delta("abc", [1, 2, 3], 3, 7.0, rows, index=2, num_chars=3)
    assert Delta.joined([first]) is first
    assert Delta.joined(DELTAS).logprobs is None
