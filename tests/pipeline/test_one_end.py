"""Every accepted request gets exactly one terminal message, and nothing after it."""

from __future__ import annotations

import random
import threading

import pytest

from tests.pipeline.checks import assert_quiet
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
from triptych.protocol.errors import DuplicateId


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
