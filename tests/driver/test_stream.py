"""What a caller sees of a request: deltas as they come, the whole at the end, errors with what came before."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from triptych.driver.stream import Completion, Delta, Stream
from triptych.protocol.errors import ModelFailed, RequestTimeout
from triptych.protocol.messages import Accepted

ACCEPTED = Accepted("a", 3, 0, 16)
DELTAS = [Delta("x", [1], 1), Delta("y", [2], 2)]


def make_stream() -> Stream:
    return Stream("a", lambda request_id, reader: None)


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


def test_deltas_are_yielded_until_the_end() -> None:
    stream = make_stream()
    play(stream)
    assert list(stream) == DELTAS


def test_deltas_are_yielded_while_they_come() -> None:
    stream = make_stream()
    stream.on_delta(DELTAS[0])
    deltas = iter(stream)
    assert next(deltas) == DELTAS[0]
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(next, deltas)
        stream.on_delta(DELTAS[1])
        assert second.result(10) == DELTAS[1]


def test_an_iteration_after_the_end_ends_at_once() -> None:
    stream = make_stream()
    play(stream)
    assert (list(stream), list(stream)) == (DELTAS, [])


def test_the_result_is_there_without_an_iteration() -> None:
    stream = make_stream()
    play(stream)
    assert (stream.result(), stream.result(), stream.done) == (completion(), completion(), True)


def test_usage_and_ledger_come_with_the_result() -> None:
    assert completion().usage == {"completion_tokens": 2}
    assert completion().ledger == {"tps": 1.0}


def test_several_threads_may_wait_for_one_result() -> None:
    stream = make_stream()
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(stream.result) for _ in range(4)]
        play(stream)
        assert [result.result(10) for result in results] == [completion()] * 4


@pytest.mark.parametrize("timeout", [0.0, 0.01])
def test_a_result_that_takes_too_long_is_a_timeout_and_the_request_goes_on(timeout: float) -> None:
    stream = make_stream()
    with pytest.raises(RequestTimeout, match=f"request a: no answer within {timeout} s"):
        stream.result(timeout)
    assert not stream.done
    play(stream)
    assert stream.result(timeout) == completion()


def test_an_acceptance_that_takes_too_long_is_a_timeout() -> None:
    with pytest.raises(RequestTimeout):
        make_stream().accepted(0.01)


def test_the_acceptance_is_there_before_the_answer() -> None:
    stream = make_stream()
    stream.on_accepted(ACCEPTED)
    assert (stream.accepted(), stream.done) == (ACCEPTED, False)


def test_a_refusal_is_raised_to_who_waits_for_the_acceptance() -> None:
    stream = make_stream()
    stream.on_end(completion("error"), failure())
    with pytest.raises(ModelFailed):
        stream.accepted()


def test_a_request_that_failed_later_was_accepted() -> None:
    stream = make_stream()
    play(stream, failure())
    assert stream.accepted() == ACCEPTED


def test_an_error_comes_after_the_deltas_before_it() -> None:
    stream = make_stream()
    play(stream, failure())
    deltas = iter(stream)
    assert [next(deltas), next(deltas)] == DELTAS
    with pytest.raises(ModelFailed):
        next(deltas)


def test_an_error_carries_what_was_produced_before_it() -> None:
    stream = make_stream()
    play(stream, failure())
    with pytest.raises(ModelFailed, match="not a number") as caught:
        stream.result()
    assert caught.value.partial == completion("error")


def test_waiting_does_not_raise_what_the_request_failed_with() -> None:
    stream = make_stream()
    play(stream, failure())
    stream.wait()
    assert stream.done


def test_an_abort_names_the_request_and_its_reader() -> None:
    asked: list[Any] = []
    stream = Stream("the id", lambda request_id, reader: asked.append((request_id, reader)))
    stream.abort()
    assert asked == [("the id", stream)]


def test_an_end_wakes_who_iterates() -> None:
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
def test_the_end_is_told_to_whoever_wants_to_know(error: ModelFailed | None) -> None:
    stream, told = make_stream(), []
    stream.on_done(lambda: told.append((stream.done, "before")))
    play(stream, error)
    stream.on_done(lambda: told.append((stream.done, "after")))
    assert told == [(True, "before"), (True, "after")]
