"""Every accepted request gets exactly one terminal message, and nothing after it."""

from __future__ import annotations

import random
import threading

import pytest

from tests.pipeline.checks import assert_quiet, expected, random_prompt
from tests.pipeline.raw import (
    ABORT,
    ACCEPTED,
    ACKNOWLEDGE,
    FAILED,
    FINISHED,
    GET_STATS,
    STATS,
    SUBMIT,
    TEXT,
    RawClient,
)
from tests.proc import is_alive
from tests.waiting import eventually
from triptych import Client, Driver
from triptych.driver import driver as driver_module
from triptych.protocol.errors import DuplicateId, RequestTooLong, TokenizationFailed


def assert_one_end(client: RawClient, request_id: str) -> None:
    assert len(client.ends(request_id)) == 1
    frames = client.received["follow"]
    last = next(i for i, f in enumerate(frames) if f[0] in (FINISHED, FAILED) and f[4] == request_id)
    rows = [row for f in frames[last + 1 :] if f[0] == TEXT for row in f[4]]
    assert not [row for row in rows if row[0] == request_id]


def test_heartbeats_around_the_end_cause_no_second_end(driver: Driver) -> None:
    with RawClient(driver.run_dir) as client:
        request_id = client.submit(prompt="hello", max_tokens=50)
        for _ in range(200):
            client.follow(request_id, 0)
        client.receive("follow", FINISHED)
        for _ in range(50):
            client.follow(request_id, 50)
        client.send("follow", GET_STATS)
        client.receive("follow", STATS)  # all earlier messages were processed
        assert_one_end(client, request_id)
        client.send("follow", ACKNOWLEDGE, [request_id])


def test_abort_at_any_moment_ends_once_and_frees_once(driver: Driver) -> None:
    with RawClient(driver.run_dir) as client:
        rng = random.Random(3)
        ids = []
        for index in range(300):
            request_id = client.submit(prompt=f"prompt {index}", max_tokens=rng.choice([1, 2, 5, 30]))
            for _ in range(rng.randrange(3)):
                if rng.random() < 0.7:
                    client.send("follow", ABORT, request_id)
                else:
                    client.follow(request_id, 0)
            ids.append(request_id)
        eventually(lambda: client.collect("follow", 0.05) is not None and all(client.ends(i) for i in ids))
        for request_id in ids:
            client.send("follow", ABORT, request_id)
        client.send("follow", GET_STATS)
        client.receive("follow", STATS)
        for request_id in ids:
            assert_one_end(client, request_id)
        client.send("follow", ACKNOWLEDGE, ids)
    assert_quiet(driver)


def test_abort_keeps_the_text_so_far(slow: Driver) -> None:
    stream = slow.submit([7, 8, 9], max_tokens=1000)
    deltas = iter(stream)
    got = next(deltas).token_ids
    stream.abort()
    for delta in deltas:
        got += delta.token_ids
    completion = stream.result()
    assert completion.finish_reason == "abort"
    assert got == completion.token_ids == expected([7, 8, 9], len(got))
    assert 0 < len(got) < 1000


def test_abort_while_waiting_for_a_credit_ends_the_request(narrow: Driver) -> None:
    running = [narrow.submit([1, 2], max_tokens=300) for _ in range(2)]
    waiting = narrow.submit([3, 4], max_tokens=5)
    waiting.accepted(10)
    waiting.abort()
    completion = waiting.result(5)
    assert (completion.finish_reason, completion.token_ids) == ("abort", [])
    assert completion.ledger["stages_ms"]["prefill"] == 0
    for stream in running:
        stream.abort()


def test_a_thousand_finished_and_a_thousand_aborted_requests_leave_nothing(driver: Driver) -> None:
    rng = random.Random(5)
    for _ in range(10):
        prompts = [random_prompt(rng, 2, 30) for _ in range(200)]
        streams = [driver.submit(prompt, max_tokens=8) for prompt in prompts]
        for stream in streams[::2]:
            stream.abort()
        for prompt, stream in zip(prompts, streams, strict=True):
            completion = stream.result(60)
            assert completion.token_ids == expected(prompt, len(completion.token_ids))
    assert_quiet(driver)


def test_max_tokens_zero_is_answered_without_a_step(driver: Driver) -> None:
    completion = driver.generate("hi", max_tokens=0)
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", [], "length")


def test_too_long_prompt_is_refused_with_both_numbers(driver: Driver) -> None:
    with pytest.raises(RequestTooLong, match="prompt has 5000 tokens, the limit is 4095"):
        driver.generate([1] * 5000)
    assert driver.generate([1, 2], max_tokens=3).token_ids == expected([1, 2], 3)


def test_truncation_of_a_prompt_is_reported(driver: Driver) -> None:
    stream = driver.submit([1] * 5000, truncation="left", max_tokens=3)
    assert stream.accepted(10).num_truncated_tokens > 0
    assert stream.result(20).usage["truncated_tokens"] == stream.accepted().num_truncated_tokens


def test_chat_template_that_raises_fails_only_its_own_request(driver: Driver) -> None:
    bad = driver.submit(messages=[{"role": "wizard", "content": "hi"}], max_tokens=2)
    good = driver.submit(messages=[{"role": "user", "content": "hi"}], max_tokens=2)
    with pytest.raises(TokenizationFailed, match="unknown role wizard"):
        bad.result(10)
    assert len(good.result(10).token_ids) == 2


@pytest.mark.parametrize("n", [1, 2])
def test_resubmission_that_overtakes_the_acknowledgement_is_told_that_it_was_answered(driver: Driver, n: int) -> None:
    """ACKNOWLEDGE goes to another process than SUBMIT, which may overtake it: the request is accepted, then unknown."""
    with Client(driver.run_dir) as client:
        for index in range(50):
            request_id = f"again-{n}-{index}"
            client.generate("hello", request_id=request_id, n=n, max_tokens=2)
            again = client.submit("hello", request_id=request_id, n=n, max_tokens=2)
            for stream in {again, *again.choices}:
                with pytest.raises(DuplicateId, match="already been answered"):
                    stream.result(10)


def test_first_follow_during_a_stop_gets_the_end() -> None:
    """ACCEPTED and the stop may cross, so summarize waits for a FOLLOW that must be in flight."""
    driver = Driver("hash-lm", hash_step_ms=2.0).start()
    with RawClient(driver.run_dir) as client:
        client.send("submit", SUBMIT, "late", {"prompt": "hello", "max_tokens": 4000})
        client.receive("submit", ACCEPTED)
        prepare = driver.pids["prepare"]
        assert prepare is not None
        stop = threading.Thread(target=driver.stop, kwargs={"mode": "abort"})
        stop.start()
        eventually(lambda: not is_alive(prepare))
        client.follow("late", 0)
        assert client.receive("follow", FINISHED, FAILED)[0] == FINISHED
        client.send("follow", ACKNOWLEDGE, ["late"])
        stop.join()
        assert_one_end(client, "late")


def test_stop_while_summarize_is_down_ends_accepted_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is down at a stop is not restarted, so no one else would send the ends."""
    monkeypatch.setattr(driver_module, "CLEAN_STOP_S", 60.0)  # a start takes long on a busy machine
    driver = Driver("hash-lm", hash_step_ms=20.0, lease_s=60.0).start()
    with Client(driver.run_dir) as client:
        stream = client.submit([1, 2], max_tokens=4000)
        next(iter(stream))
        driver.restart("summarize")  # it is killed an instant later, perhaps only during the stop
        driver.stop(mode="abort")
        assert stream.result(10).finish_reason == "abort"
