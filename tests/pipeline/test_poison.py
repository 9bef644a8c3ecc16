"""A request that crashes the process that works on it is identified and fails, and no other request does."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forking import shared_with_changes
from tests.pipeline.checks import assert_quiet, expected, random_prompt
from tests.pipeline.conftest import hash_driver
from tests.waiting import eventually
from triptych import Driver
from triptych.protocol.errors import ModelFailed, Poisoned, RequestError

SPARE, FROM_OUTPUT = 257, 100
RAISE, ABORT, SEGV, HANG, NAN, EXIT, MEMORY = range(1, 8)
NUM_INNOCENTS = 8


@pytest.fixture(scope="module", autouse=True)
def faults() -> Iterator[None]:
    folder = Path(__file__).parent / "faults"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        with shared_with_changes():  # by servers that Python has given the faults
            yield


@pytest.fixture(scope="module")
def _driver(faults: None) -> Iterator[Driver]:
    """Deaths are forgotten soon, so that no test delays the next one's restarts or degrades the pipeline."""
    with hash_driver(hash_step_ms=1.0, lease_s=30.0, hang_s=1.0, restart_window_s=0.1) as driver:
        yield driver


@pytest.fixture
def driver(_driver: Driver) -> Iterator[Driver]:
    eventually(lambda: _driver.healthy)
    yield _driver
    assert_quiet(_driver)


def unaffected_requests(driver: Driver, num_tokens: int = 300) -> Iterator[None]:
    """Start other requests, let the test run, and then prove that they were not affected."""
    rng = random.Random(5)
    prompts = [random_prompt(rng) for _ in range(NUM_INNOCENTS)]
    streams = [driver.submit(prompt, max_tokens=num_tokens) for prompt in prompts]
    for stream in streams:
        next(iter(stream))  # not the number that decode: all may have ended before this process looks
    yield
    for prompt, stream in zip(prompts, streams, strict=True):
        assert stream.result(60).token_ids == expected(prompt, num_tokens)


def restarts(driver: Driver, role: str) -> int:
    return int(driver.stats()["restarts"][role])


@pytest.mark.parametrize("kind", [SEGV, EXIT, HANG], ids=["segv", "exit", "hang"])
def test_request_that_crashes_execute_is_poisoned_after_two_crashes(driver: Driver, kind: int) -> None:
    others, deaths = unaffected_requests(driver), restarts(driver, "execute")
    next(others)
    poison = driver.submit([5, SPARE, kind], max_tokens=10)
    with pytest.raises(Poisoned, match="twice"):
        poison.result(60)
    assert restarts(driver, "execute") == deaths + 2
    next(others, None)


def test_hang_is_recognised_although_execute_is_replaced_all_the_time(driver: Driver) -> None:
    """Each successor runs the same request, and would be replaced before it counts as hung."""
    stopping = threading.Event()

    def replace_all_the_time() -> None:
        while not stopping.wait(0.1):
            driver.replace("execute")

    operator = threading.Thread(target=replace_all_the_time)
    operator.start()
    try:
        with pytest.raises(Poisoned, match="twice"):
            driver.submit([6, SPARE, HANG], max_tokens=10).result(20)  # new: a known one would be refused at once
    finally:
        stopping.set()
        operator.join()


def test_innocent_suspects_are_cleared_at_full_speed(driver: Driver) -> None:
    streams = [driver.submit([5, index], max_tokens=3000) for index in range(1, 33)]
    eventually(lambda: driver.stats()["execute"]["decoding"] == 32)
    deaths, began = restarts(driver, "execute"), time.monotonic()
    os.kill(eventually(lambda: driver.pids["execute"]), signal.SIGSEGV)
    eventually(lambda: restarts(driver, "execute") == deaths + 1)
    last_steps = driver.stats()["execute"]["steps"]

    def all_came_through() -> bool:
        stats = driver.stats()["execute"]
        return stats["steps"] != last_steps and stats["decoding"] == 32 and not stats["suspects"]

    eventually(all_came_through)
    assert time.monotonic() - began < 6, "waiting for the next tick each time would take longer"
    for stream in streams:
        stream.abort()


def test_suspected_beam_search_runs_alone_as_a_whole_and_continues(driver: Driver) -> None:
    prompt = random_prompt(random.Random(6))
    search: dict[str, Any] = {"max_tokens": 200, "n": 2, "num_beams": 3}
    wanted = [choice.token_ids for choice in driver.submit(prompt, **search).result(60).choices]
    stream = driver.submit(prompt, **search)
    before = driver.stats()["execute"]["steps"]
    eventually(lambda: driver.stats()["execute"]["steps"] > before + 20)
    with pytest.raises(Poisoned, match="twice"):
        driver.submit([5, SPARE, ABORT], max_tokens=10).result(60)
    assert [choice.token_ids for choice in stream.result(60).choices] == wanted


@pytest.mark.parametrize("kind", [RAISE, NAN, MEMORY], ids=["raise", "nan", "memory"])
def test_request_whose_step_raises_fails_alone_without_a_restart(driver: Driver, kind: int) -> None:
    others, deaths = unaffected_requests(driver), restarts(driver, "execute")
    next(others)
    poison = driver.submit([5, SPARE, kind], max_tokens=10)
    with pytest.raises(ModelFailed):
        poison.result(60)
    next(others, None)
    assert restarts(driver, "execute") == deaths


def test_poison_in_the_middle_of_an_answer_is_identified(driver: Driver) -> None:
    others = unaffected_requests(driver)
    next(others)
    poison = driver.submit([5, SPARE, ABORT, FROM_OUTPUT + 20], max_tokens=50)
    with pytest.raises(Poisoned) as caught:
        poison.result(60)
    assert len(caught.value.partial.token_ids) == 20
    next(others, None)


def test_beam_search_that_crashes_execute_only_with_several_beams_is_identified(driver: Driver) -> None:
    others, deaths = unaffected_requests(driver), restarts(driver, "execute")
    next(others)
    with pytest.raises(Poisoned, match="twice"):
        driver.submit([5, SPARE, ABORT, FROM_OUTPUT + 2], max_tokens=10, num_beams=3).result(60)
    assert restarts(driver, "execute") == deaths + 2
    next(others, None)


def test_two_poisonous_requests_at_once_are_both_identified(driver: Driver) -> None:
    others = unaffected_requests(driver)
    next(others)
    poisons = [driver.submit([7, SPARE, ABORT, i + 1], max_tokens=10) for i in range(2)]
    for poison in poisons:
        with pytest.raises(Poisoned):
            poison.result(60)
    next(others, None)


def test_kills_from_outside_blame_no_request(driver: Driver) -> None:
    stream = driver.submit([1, 2, 3], max_tokens=600)
    for _ in range(3):
        steps = driver.stats()["execute"].get("steps", 0)
        pid = eventually(lambda: driver.pids["execute"])
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid, steps=steps: driver.pids["execute"] not in (None, pid) and driver.healthy)  # type: ignore[misc]
        eventually(lambda: driver.stats()["execute"].get("steps", 0) > 3)
    assert stream.result(60).token_ids == expected([1, 2, 3], 600)


def test_stopped_process_is_replaced_and_no_request_blamed(driver: Driver) -> None:
    stream = driver.submit([1, 2, 3], max_tokens=1500)
    next(iter(stream))
    for _ in range(2):
        pid = eventually(lambda: driver.pids["execute"])
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda pid=pid: driver.pids["execute"] not in (None, pid) and driver.healthy)  # type: ignore[misc]
    assert stream.result(60).token_ids == expected([1, 2, 3], 1500)


@pytest.mark.parametrize("kind", ["abort", "hang"])
@pytest.mark.parametrize("length", [10, 40_000], ids=["short", "beside"])
def test_prompt_that_crashes_prepare_is_refused_under_another_id_too(driver: Driver, kind: str, length: int) -> None:
    if kind == "hang" and length > 10:
        pytest.skip("a hanging helper thread blocks no one and kills no process")
    others, deaths = unaffected_requests(driver), restarts(driver, "prepare")
    next(others)
    text = f"<<{kind}>>{deaths}" + "x" * length  # whose worker did not crash before
    for _ in range(2):
        with pytest.raises(Poisoned):
            driver.submit(text, max_tokens=3, truncation="right").result(60)
        assert restarts(driver, "prepare") == deaths + 2
    assert driver.generate([3, 4], max_tokens=5).token_ids == expected([3, 4], 5)
    next(others, None)


def test_prompt_that_raises_in_prepare_is_refused_without_a_restart(driver: Driver) -> None:
    deaths = restarts(driver, "prepare")
    with pytest.raises(RequestError, match="could not be prepared"):
        driver.submit("<<raise>>", max_tokens=3).result(20)
    assert restarts(driver, "prepare") == deaths


def test_tokens_that_crash_summarize_fail_only_their_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, num_tokens = [9, 8, 7], 40
    fatal = expected(prompt, num_tokens)[20]
    others = [p for p in ([i, i + 1, 5] for i in range(1, 200)) if fatal not in expected(p, num_tokens)][:8]
    monkeypatch.setenv("TRIPTYCH_FATAL_TOKEN", str(fatal))
    with hash_driver(hash_step_ms=2.0, lease_s=30.0) as driver:
        streams = [driver.submit(p, max_tokens=num_tokens) for p in others]
        with pytest.raises(Poisoned):
            driver.submit(prompt, max_tokens=num_tokens).result(60)
        assert [s.result(60).token_ids for s in streams] == [expected(p, num_tokens) for p in others]
        assert driver.stats()["restarts"]["summarize"] == 2
        assert_quiet(driver)


def test_any_number_of_identified_poisonous_requests_is_survived() -> None:
    """Four deaths that were all explained say nothing about the next process."""
    with hash_driver(lease_s=30.0, max_restarts=1) as driver:
        for number in range(2):
            with pytest.raises(Poisoned):
                driver.submit(f"<<abort>>{number}", max_tokens=3).result(60)
        health = driver.health()
        assert (health.workers["prepare"].restarts, health.workers["prepare"].recent_deaths) == (4, 0)
        assert driver.generate([3, 4], max_tokens=5).token_ids == expected([3, 4], 5)
