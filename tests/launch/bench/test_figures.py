"""The arithmetic from records to results, checked by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from triptych.launch.bench.drive import Clock, Failure, Run, drive
from triptych.launch.bench.options import LoadOptions
from triptych.launch.bench.record import Record
from triptych.launch.bench.summary import Targets, summarize
from triptych.launch.bench.workload import Query

ANYTHING = Targets(None, None)


def record(*event_times_s: float, scheduled_s: float = 0.0, ended_s: float | None = 2.0, **others: Any) -> Record:
    fields = {"num_output_tokens": len(event_times_s), **others}
    return Record(0, scheduled_s, sent_s=scheduled_s, event_times_s=[*event_times_s], ended_s=ended_s, **fields)


def test_times_count_from_the_arrival() -> None:
    one = record(1.0, 1.2, 1.6, scheduled_s=0.5)
    assert (one.ttft_ms, one.e2e_ms) == (500, 1500)
    assert one.gaps_ms == pytest.approx([200, 400])
    assert [one.tpot_ms, one.tokens_per_second] == pytest.approx([300, 1000 / 300])


def test_lag_of_the_client_is_reported() -> None:
    late = replace(record(1.0, scheduled_s=0.5), sent_s=0.75)
    assert summarize([late], 1.0, ANYTHING)["client_lag_ms"]["max"] == 250


def test_event_with_several_tokens_is_one_gap_and_several_tokens() -> None:
    one = record(1.0, 2.0, num_output_tokens=11)
    assert (one.gaps_ms, one.tpot_ms) == ([1000], 100)


def test_single_token_has_no_time_per_token() -> None:
    assert (record(1.0).tpot_ms, record(1.0).tokens_per_second, record().ttft_ms) == (None, None, None)


def test_failures_are_counted_and_add_no_latency() -> None:
    bad = Record(1, 0.0, error="http_429", message="full")
    summary = summarize([record(1.0, 1.5), bad], 4.0, ANYTHING)
    assert (summary["num_answered"], summary["errors"], summary["first_message"]) == (1, {"http_429": 1}, "full")
    assert (summary["requests_per_s"], summary["output_tokens_per_s"]) == (0.25, 0.5)
    assert summary["ttft_ms"]["max"] == 1000
    assert summary["goodput"] is None


def test_no_answers_do_not_divide_by_zero() -> None:
    summary = summarize([Record(0, 0.0, error="x")], 1.0, Targets(1.0, 1.0))
    assert (summary["ttft_ms"], summary["goodput"]["share"]) == (None, 0)


def test_goodput_counts_requests_that_met_both_targets() -> None:
    quick, late, slow = record(0.1, 0.2), record(0.9, 1.0), record(0.1, 0.9)
    failed = Record(3, 0.0, error="x")
    summary = summarize([quick, late, slow, failed], 2.0, Targets(ttft_ms=500, itl_ms=200))
    assert summary["goodput"] == {
        "ttft_target_ms": 500,
        "itl_target_ms": 200,
        "num_good": 1,
        "share": 0.25,
        "requests_per_s": 0.5,
    }


class SlowServer:
    """Answers one request at a time, each after ``work_s``."""

    def __init__(self, work_s: float) -> None:
        self._work_s, self._turn, self.most_under_way, self._under_way = work_s, asyncio.Semaphore(1), 0, 0

    async def ask(self, query: Query, record: Record, clock: Clock) -> None:
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)
        async with self._turn:
            await asyncio.sleep(self._work_s)
        record.event_times_s.append(clock())
        self._under_way -= 1
        if query.max_tokens == 13:
            raise Failure("unlucky", "13")


def driven(load: LoadOptions, *max_tokens: int, work_s: float = 0.02) -> tuple[Run, SlowServer]:
    async def body() -> tuple[Run, SlowServer]:
        server = SlowServer(work_s)
        return await drive(server, [Query({}, n) for n in max_tokens], load, Run()), server

    return asyncio.run(body())


def test_arrivals_do_not_wait_for_a_slow_server() -> None:
    run, server = driven(LoadOptions(request_rate=200, arrival="fixed"), *[1] * 10)
    assert server.most_under_way > 2
    # The server needs 20 ms for each request, and one arrives every 5 ms: the last has waited for all before it.
    assert run.records[-1].ttft_ms is not None
    assert run.records[-1].ttft_ms > 0.9 * (10 * 20 - 9 * 5)
    assert [record.scheduled_s for record in run.records] == [index / 200 for index in range(10)]


def test_at_a_rate_waiting_for_a_free_slot_counts() -> None:
    run, server = driven(LoadOptions(request_rate=1000, arrival="fixed", max_concurrency=1), *[1] * 5)
    assert server.most_under_way == 1
    assert run.records[-1].scheduled_s == pytest.approx(0.004)
    assert run.records[-1].ttft_ms is not None
    assert run.records[-1].ttft_ms > 80


def test_without_a_rate_a_request_arrives_when_it_gets_a_slot() -> None:
    run, server = driven(LoadOptions(max_concurrency=2), *[1] * 6)
    assert server.most_under_way == 2
    assert run.records[-1].scheduled_s > 0.05


def test_error_affects_only_its_request() -> None:
    run, _ = driven(LoadOptions(), 1, 13, 1, work_s=0.0)
    assert [record.error for record in run.records] == [None, "unlucky", None]
    assert (run.num_sent, run.num_ended) == (3, 3)
