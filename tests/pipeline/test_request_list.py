"""GET_REQUESTS: the state of every request, without any of its text."""

from __future__ import annotations

import pytest

from tests.waiting import eventually
from triptych import Client, Driver
from triptych.driver.standing import RequestLine
from triptych.protocol import messages as m


def lines(driver: Driver) -> dict[str, RequestLine]:
    return {line.request_id: line for line in driver.client.requests().lines}


def states(driver: Driver, *names: str) -> list[str]:
    found = lines(driver)
    return [found[name].state if name in found else "" for name in names]


def test_requests_are_listed_with_their_state(narrow: Driver) -> None:
    streams = [narrow.submit("secret " * 3, request_id=name, max_tokens=3000) for name in "abcd"]
    eventually(lambda: states(narrow, *"acd") == ["decode", "waiting", "waiting"])
    assert states(narrow, "b")[0] in ("queued", "prefill", "decode")  # prefilled ahead, waiting for the row
    line = eventually(lambda: lines(narrow)["a"] if lines(narrow)["a"].tokens_per_second else None)
    assert (line.max_tokens, line.num_preemptions) == (3000, 0)
    assert 0 < line.num_tokens < 3000
    listing = narrow.client.requests(2)
    assert ([line.request_id for line in listing.lines], listing.num_left_out) == (["a", "b"], 2)
    assert 0 < listing.age_s(listing.lines[0]) < 60
    for stream in streams:
        stream.abort()
        stream.result(20)


def test_ended_answer_is_listed_until_it_is_acknowledged(narrow: Driver) -> None:
    with Client(narrow.run_dir) as gone:
        gone.submit("x", request_id="ended", max_tokens=3, lease_s=60).accepted(20)
    eventually(lambda: states(narrow, "ended") == ["ended"])
    assert lines(narrow)["ended"].num_tokens == 3
    narrow.client.resume("ended").result(20)
    eventually(lambda: states(narrow, "ended") == [""])


def test_list_does_not_contain_texts(narrow: Driver) -> None:
    stream = narrow.submit("a secret prompt", request_id="quiet", max_tokens=500)
    next(iter(stream))
    answer = narrow.client.session.ask(m.GetRequests(10)).result(10)
    assert "secret" not in str(answer)
    *columns, stages_ms = zip(*answer.rows, strict=True)
    assert all(type(value) in (str, int, float, type(None)) for column in columns for value in column)
    assert {(len(stages), *map(type, stages)) for stages in stages_ms} == {(11, *[float] * 11)}
    stream.abort()
    stream.result(20)


def test_line_shows_where_the_time_was_spent(narrow: Driver) -> None:
    streams = [narrow.submit("x", request_id=name, max_tokens=3000) for name in ("first", "second", "third")]
    eventually(lambda: states(narrow, "first", "third") == ["decode", "waiting"])
    listing = narrow.client.requests()
    for line in listing.lines:
        assert sum(line.stages_ms) == pytest.approx(listing.age_s(line) * 1e3, abs=20)
    spent = {line.request_id: dict(zip(m.LEDGER_STAGES, line.stages_ms, strict=True)) for line in listing.lines}
    assert max(spent["third"], key=lambda stage: spent["third"][stage]) == "credit"
    assert spent["first"]["decode"] > 0
    for stream in streams:
        stream.abort()
        stream.result(20)


def test_last_ended_requests_are_listed_after_their_acknowledgement(narrow: Driver) -> None:
    answers = [narrow.generate("x", request_id=name, max_tokens=5) for name in ("one", "two")]
    eventually(lambda: states(narrow, "two") == [""])
    two, one = narrow.client.requests().ended[:2]
    assert (one.request_id, two.request_id, two.state, two.num_tokens) == ("one", "two", "length", 5)
    assert answers[1].ledger is not None
    ledger = answers[1].ledger["stages_ms"]
    assert two.stages_ms[5] == pytest.approx(ledger["decode"], abs=0.01)
    for _ in range(m.MAX_ENDED_ROWS + 1):
        narrow.generate("x", max_tokens=0)
    assert len(narrow.client.requests().ended) == m.MAX_ENDED_ROWS


@pytest.mark.parametrize("limit", [-1, 0, 2**40])
def test_any_limit_is_answered(narrow: Driver, limit: int) -> None:
    assert len(narrow.client.requests(limit).lines) <= m.MAX_REQUEST_ROWS


def test_statistics_contain_the_duration_of_each_start(narrow: Driver) -> None:
    stages = narrow.client.stats()
    for role in ("prepare", "execute", "summarize"):
        assert set(stages[role]["startup_s"]) == {"starting", "loading"}
        assert 0 < stages[role]["startup_s"]["starting"] < 60
