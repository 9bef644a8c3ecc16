"""Jobs in a helper thread: a hanging thread is abandoned, and everything else continues."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from tests.simulation.clock import Clock
from tests.waiting import eventually
from triptych.workers.prepare import job_thread
from triptych.workers.prepare.job_thread import MAX_STUCK, JobThread


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """A job that waits for this event hangs until the test ends."""
    event = threading.Event()
    yield event
    event.set()


def collected(jobs: JobThread[int], results: list[int | None], count: int) -> list[int | None]:
    def all_there() -> bool:
        jobs.collect()
        return len(results) >= count

    eventually(all_there)
    return results


def hang(event: threading.Event) -> int:
    event.wait()
    return -1


def test_jobs_are_done_in_order_in_another_thread() -> None:
    jobs, results, threads = JobThread[int](60.0, ring=lambda: None), list[int | None](), set[int]()

    def work(number: int) -> int:
        threads.add(threading.get_ident())
        return number

    for number in range(5):
        jobs.submit(b"a", partial(work, number), results.append)
    assert collected(jobs, results, 5) == [0, 1, 2, 3, 4]
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    jobs.close()


def test_jobs_of_one_owner_only_delay_that_owner() -> None:
    jobs, results = JobThread[int](60.0, ring=lambda: None), list[int | None]()
    for owner, numbers in ((b"greedy", (0, 1, 2, 3)), (b"modest", (10, 11)), (7, (20,))):
        for number in numbers:
            jobs.submit(owner, partial(int, number), results.append)
    assert collected(jobs, results, 7) == [0, 1, 10, 20, 2, 11, 3]
    jobs.close()


def test_job_waits_while_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a limit for processes."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    jobs, results = JobThread[int](60.0, ring=lambda: None), list[int | None]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        jobs.submit(b"a", lambda: 1, results.append)
        jobs.collect()
    jobs.submit(b"a", lambda: 2, results.append)
    assert collected(jobs, results, 2) == [1, 2]
    jobs.close()


def test_completion_rings_the_bell() -> None:
    bell = threading.Event()
    jobs = JobThread[int](60.0, ring=bell.set)
    jobs.submit(b"a", lambda: 1, lambda result: None)
    assert bell.wait(60)
    jobs.close()


def test_hanging_job_fails_alone(stuck: threading.Event) -> None:
    jobs, results = JobThread[int](1.0, ring=lambda: None), list[int | None]()
    jobs.submit(b"a", lambda: 1, results.append)
    jobs.submit(b"a", lambda: hang(stuck), results.append)
    jobs.submit(b"a", lambda: 3, results.append)
    assert collected(jobs, results, 3) == [1, None, 3]
    assert jobs.num_stuck == 1
    jobs.close()


def test_late_result_of_an_abandoned_thread_is_ignored(stuck: threading.Event) -> None:
    jobs, results = JobThread[int](1.0, ring=lambda: None), list[int | None]()
    jobs.submit(b"a", lambda: hang(stuck), results.append)
    assert collected(jobs, results, 1) == [None]
    stuck.set()
    jobs.submit(b"a", lambda: 2, results.append)
    assert collected(jobs, results, 2) == [None, 2]
    jobs.close()


def test_time_during_which_the_process_was_stopped_does_not_count(
    stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a paused container, which may stay so for longer than any limit."""
    clock, results = Clock(), list[int | None]()
    monkeypatch.setattr(job_thread, "time", clock)
    jobs = JobThread[int](1.0, ring=lambda: None)
    jobs.submit(b"a", lambda: hang(stuck), results.append)
    for pause_s in (3600.0, 0.25):
        clock.now_ns += int(pause_s * 1e9)
        jobs.collect()
    assert results == []
    clock.now_ns += 10**9
    jobs.collect()
    assert results == [None]
    jobs.close()


def test_too_many_stuck_threads_raise(stuck: threading.Event) -> None:
    jobs, results = JobThread[int](0.01, ring=lambda: None), list[int | None]()
    for _ in range(MAX_STUCK):
        jobs.submit(b"a", lambda: hang(stuck), results.append)
    with pytest.raises(RuntimeError, match=f"{MAX_STUCK} threads"):
        collected(jobs, results, MAX_STUCK + 1)
    assert results == [None] * MAX_STUCK


def test_abandoned_thread_that_returns_no_longer_counts_as_stuck(stuck: threading.Event) -> None:
    """Otherwise eight slow jobs during the life of a process would end it."""
    jobs, results, threads = JobThread[int](0.01, ring=lambda: None), list[int | None](), list[threading.Thread]()

    def work() -> int:
        threads.append(threading.current_thread())
        return hang(stuck)

    for _ in range(MAX_STUCK - 1):
        jobs.submit(b"a", work, results.append)
    collected(jobs, results, MAX_STUCK - 1)
    stuck.set()

    def all_came_back() -> bool:
        jobs.collect()
        return jobs.num_stuck == 0

    eventually(all_came_back)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    jobs.close()
