"""Deadlines, priorities and salts, from a client to the scheduler."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.checks import assert_quiet, expected
from tests.pipeline.conftest import hash_driver
from tests.pipeline.killing import kill
from tests.pipeline.raw import ACKNOWLEDGE, FAILED, RawClient
from tests.waiting import eventually
from triptych import Driver
from triptych.driver.stream import Completion, Stream
from triptych.protocol.errors import DeadlineExceeded

FOREVER = 3000  # tokens of an answer that lasts longer than its test


def failed(stream: Stream, timeout: float = 10.0) -> tuple[DeadlineExceeded, Completion]:
    with pytest.raises(DeadlineExceeded) as caught:
        stream.result(timeout)
    partial: Completion = caught.value.partial
    return caught.value, partial


def fill(driver: Driver) -> list[Stream]:
    """Requests that take every credit of a pipeline with one row, and decode for long."""
    streams = [driver.submit([1, 2], max_tokens=FOREVER) for _ in range(2)]
    eventually(lambda: driver.stats()["prepare"].get("live") == 2)
    return streams


def end(driver: Driver, streams: list[Stream]) -> None:
    for stream in streams:
        stream.abort()
    assert_quiet(driver)


def test_deadline_while_decoding_ends_with_the_text_so_far(slow: Driver) -> None:
    started = time.monotonic()
    error, partial = failed(slow.submit([7, 8], max_tokens=FOREVER, deadline_ms=300))
    assert 0.25 < time.monotonic() - started < 5
    assert partial.token_ids == expected([7, 8], len(partial.token_ids))
    assert 0 < len(partial.token_ids) < FOREVER
    assert partial.text
    assert f"after {len(partial.token_ids)} tokens" in str(error)


@pytest.mark.parametrize("field", ["deadline_ms", "max_queue_ms"])
def test_time_limit_that_passes_without_a_credit_ends_the_request(narrow: Driver, field: str) -> None:
    running = fill(narrow)
    limit: dict[str, Any] = {field: 200}
    waiting = narrow.submit([3, 4], max_tokens=5, **limit)
    _, partial = failed(waiting)
    assert partial.token_ids == []
    assert not any(stream.done for stream in running)
    eventually(lambda: narrow.stats()["prepare"]["waiting"] == 0)
    end(narrow, running)


def test_request_scheduled_in_time_outlives_the_queue_limit(slow: Driver) -> None:
    completion = slow.generate([3, 4], max_tokens=200, max_queue_ms=150, timeout=20)
    assert completion.token_ids == expected([3, 4], 200)
    assert completion.ledger["wall_ms"] > 150


def test_deadline_is_enforced_while_execute_is_down(slow: Driver) -> None:
    stream = slow.submit([5, 6], max_tokens=FOREVER, deadline_ms=700)
    other = slow.submit([6, 7], max_tokens=200, deadline_ms=60_000, max_queue_ms=300)
    next(iter(stream))
    next(iter(other))
    kill(slow, "execute")
    _, partial = failed(stream)
    assert partial.token_ids == expected([5, 6], len(partial.token_ids))
    assert other.result(20).token_ids == expected([6, 7], 200)


def test_request_that_is_not_scheduled_because_execute_is_down_ends(slow: Driver) -> None:
    os.kill(eventually(lambda: slow.pids["execute"]), signal.SIGKILL)
    _, partial = failed(slow.submit([5, 6], max_tokens=5, max_queue_ms=20))
    assert partial.token_ids == []
    assert slow.generate([5, 6], max_tokens=5, timeout=20).token_ids == expected([5, 6], 5)


def test_passed_deadline_is_still_the_reason_after_summarize_died(slow: Driver) -> None:
    with RawClient(slow.run_dir) as client:
        request_id = client.submit(prompt="x", max_tokens=FOREVER, deadline_ms=150)
        assert client.receive("follow", FAILED)[10] == "deadline_exceeded"
        kill(slow, "summarize")
        client.follow(request_id, 0, again=True)
        again = client.receive("follow", FAILED)
        assert again[10] == "deadline_exceeded"
        client.send("follow", ACKNOWLEDGE, [request_id])


def test_prefixes_are_shared_only_within_a_salt(driver: Driver) -> None:
    prompt = list(range(150, 250))  # sent by no other test
    answers = [driver.generate(prompt, max_tokens=4, cache_salt=salt) for salt in ("a", "b", "a", "")]
    assert [answer.usage["cached_tokens"] for answer in answers] == [0, 0, 96, 0]
    assert driver.generate(prompt, max_tokens=4).usage["cached_tokens"] == 96


def order_of_starts(folder: Path, priorities: list[int], *, kills: tuple[str, ...] = (), **options: Any) -> list[int]:
    """The order in which waiting requests were scheduled, by index; workers are killed before that."""
    trace = folder / "steps.jsonl"
    with hash_driver(hash_step_ms=2.0, max_num_seqs=1, trace=str(trace), **options) as driver:
        running = fill(driver)
        streams = []
        for priority in priorities:
            streams.append(driver.submit([9, 9], max_tokens=3, priority=priority))
            streams[-1].accepted(10)
        for role in kills:
            kill(driver, role)
        eventually(lambda: driver.stats()["prepare"]["waiting"] == len(streams))
        for stream in running:
            stream.abort()
        assert [stream.result(20).token_ids for stream in streams] == [expected([9, 9], 3)] * len(streams)
        assert_quiet(driver)
    slots = [slot for line in trace.read_text().splitlines() for slot, _ in json.loads(line).get("starts", [])]
    return [slot - len(running) for slot in slots if slot >= len(running)]


def test_restarted_prepare_restores_the_order(tmp_path: Path) -> None:
    # One level is worth four later arrivals, so the first request is last, but would not be with one more level.
    options: dict[str, Any] = {"policy": "priority", "priority_ageing": 4, "kills": ("prepare",)}
    assert order_of_starts(tmp_path, [1, 0, 0, -1], **options) == [3, 1, 2, 0]


def test_low_priority_request_does_not_starve(tmp_path: Path) -> None:
    order = order_of_starts(tmp_path, [1, *[0] * 8], policy="priority", priority_ageing=4)
    assert order == [1, 2, 3, 0, 4, 5, 6, 7, 8]


def test_other_policies_ignore_priorities(tmp_path: Path) -> None:
    assert order_of_starts(tmp_path, [3, 2, -5]) == [0, 1, 2]
