"""A batch waits for events, and ends when its pipeline ends."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.waiting import eventually
from triptych import Driver
from triptych.launch.batch import Batch
from triptych.launch.pipeline import Pipeline
from triptych.launch.prompts import jobs_from_texts
from triptych.launch.terminal.progress import TokenRate
from triptych.protocol.errors import WorkerDied


def batch_on(driver: Driver, *prompts: str, max_tokens: int) -> Batch:
    pipeline = Pipeline(driver.client, Path(driver.run_dir), driver)
    return Batch(pipeline, [(job, {**job.request, "max_tokens": max_tokens}) for job in jobs_from_texts(prompts)])


def test_tokens_are_counted_as_they_arrive_and_a_pipeline_that_gives_up_ends_the_batch() -> None:
    with Driver("hash-lm", hash_step_ms=2, max_restarts=0) as driver:
        batch = batch_on(driver, "a", "b", "c", max_tokens=50)
        seen = []
        for _ in batch.answers():
            seen.append((batch.num_ended, batch.num_tokens))
        assert seen[-1] == (3, 150)
        assert [num_tokens >= 50 for _, num_tokens in seen] == [True] * 3
        batch, pid = batch_on(driver, "a", "b", max_tokens=3000), driver.pids["execute"]
        assert pid is not None
        client = driver.client

        def abort_worker() -> None:
            eventually(lambda: client.stats()["summarize"]["tokens"] > 150)
            os.kill(pid, signal.SIGABRT)

        with ThreadPoolExecutor() as pool:
            pool.submit(abort_worker)
            with pytest.raises(WorkerDied):
                list(batch.answers())


def test_rate_is_that_of_the_last_moments() -> None:
    rate = TokenRate()
    assert rate.update(0, now=0.0) == 0
    assert rate.update(10, now=1.0) == 10
    assert rate.update(10, now=20.0) < 1
