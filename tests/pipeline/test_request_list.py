"""GET_REQUESTS: where every request stands, without a word of what it says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pipeline.conftest import hash_driver
from tests.waiting import eventually
from triptych import Client, Driver
from triptych.driver.standing import RequestLine
from triptych.protocol import messages as m


@pytest.fixture(scope="module")
def narrow() -> Iterator[Driver]:
    """One row, two credits, and steps slow enough to be watched."""
    with hash_driver(max_num_seqs=1, hash_step_ms=5) as driver:
        yield driver


def lines(driver: Driver) -> dict[str, RequestLine]:
    return {line.request_id: line for line in driver.client.requests().lines}


def states(driver: Driver, *names: str) -> list[str]:
    found = lines(driver)
    return [found[name].state if name in found else "" for name in names]


def test_requests_are_listed_where_they_stand(narrow: Driver) -> None:
    streams = [narrow.submit("secret " * 3, request_id=name, max_tokens=3000) for name in "abcd"]
    eventually(lambda: states(narrow, *"acd") == ["decode", "waiting", "waiting"])
    assert states(narrow, "b")[0] in ("queued", "prefill", "decode")  # prefilled ahead: it waits for the row
    line = eventually(lambda: lines(narrow)["a"] if lines(narrow)["a"].tokens_per_second else None)
    assert (line.max_tokens, line.num_preemptions) == (3000, 0)
    assert 0 < line.num_tokens < 3000
    listing = narrow.client.requests(2)
    assert ([line.request_id for line in listing.lines], listing.num_left_out) == (["a", "b"], 2)
    assert 0 < listing.age_s(listing.lines[0]) < 60
    for stream in streams:
        stream.abort()
        stream.result(20)


def test_an_ended_answer_is_listed_until_it_is_acknowledged(narrow: Driver) -> None:
    with Client(narrow.run_dir) as gone:
        gone.submit("x", request_id="ended", max_tokens=3).accepted(20)
    eventually(lambda: states(narrow, "ended") == ["ended"])
    assert lines(narrow)["ended"].num_tokens == 3
    narrow.client.resume("ended").result(20)
    eventually(lambda: states(narrow, "ended") == [""])


def test_what_a_request_says_is_not_in_the_list(narrow: Driver) -> None:
    stream = narrow.submit("a secret prompt", request_id="quiet", max_tokens=500)
    next(iter(stream))
    answer = narrow.client.session.ask(m.GetRequests(10)).result(10)
    assert "secret" not in str(answer)
    assert all(type(value) in (str, int, float, type(None)) for row in answer.rows for value in row)
    assert {len(row) for row in answer.rows} == {10}
    stream.abort()
    stream.result(20)


@pytest.mark.parametrize("limit", [-1, 0, 2**40])
def test_any_limit_is_answered(narrow: Driver, limit: int) -> None:
    assert len(narrow.client.requests(limit).lines) <= m.MAX_REQUEST_ROWS


def test_the_statistics_tell_what_each_start_took(narrow: Driver) -> None:
    stages = narrow.client.stats()
    for role in ("prepare", "execute", "summarize"):
        assert set(stages[role]["startup_s"]) == {"starting", "loading"}
        assert 0 < stages[role]["startup_s"]["starting"] < 60
