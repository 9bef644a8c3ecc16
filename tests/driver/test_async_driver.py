"""The asyncio interface of a driver: its start, its stop and what a cancellation leaves."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.waiting import eventually
from triptych import AsyncDriver, Driver
from triptych.protocol.board import ROLES
from triptych.protocol.errors import ConfigError, PipelineClosed
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import expected_tokens

SAID = expected_tokens([5, 6, 7], 9, VOCAB_SIZE)


def test_async_driver_starts_answers_and_stops() -> None:
    async def body() -> None:
        driver = AsyncDriver("hash-lm")
        with pytest.raises(PipelineClosed):
            driver.submit([5])
        async with driver:
            assert (await driver.generate([5, 6, 7], max_tokens=9)).token_ids == SAID
            stream = driver.submit([5, 6, 7], max_tokens=9)
            assert [token async for delta in stream for token in delta.token_ids] == SAID
            assert (await driver.info())["model"]["model_type"] == "hash-lm"
            assert (await driver.stats())["restarts"] == dict.fromkeys(ROLES, 0)
            assert [a.token_ids for a in await driver.generate_all([[5, 6, 7]] * 2, max_tokens=9)] == [SAID] * 2
            assert (driver.health().status, driver.run_dir) == ("ok", driver.driver.run_dir)
            assert await driver.replace("prepare") > 0
            with pytest.raises(ConfigError, match="'nobody' is not loaded"):
                await driver.unload_adapter("nobody")
            with pytest.raises(ConfigError, match="nowhere"):
                await driver.load_adapter("somebody", "/nowhere")
            assert await driver.drain()
        with pytest.raises(PipelineClosed):
            await driver.generate([5])

    asyncio.run(body())


def test_cancelled_exit_of_an_async_driver_does_not_wait_for_answers_and_it_can_be_started_again() -> None:
    async def use(driver: AsyncDriver) -> None:
        async with driver:
            await driver.submit([5, 6, 7], max_tokens=4000).accepted()

    async def body() -> None:
        driver = AsyncDriver("hash-lm", hash_step_ms=20)
        using = asyncio.create_task(use(driver))
        await asyncio.to_thread(eventually, lambda: has_status(driver.driver, "draining"))
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
        assert driver.driver.stop() == {}, "it is stopped"
        await driver.start()
        assert (await driver.generate([5, 6, 7], max_tokens=1)).token_ids == SAID[:1]
        await driver.stop()

    started = time.monotonic()
    asyncio.run(body())
    assert time.monotonic() - started < 20, "four thousand steps would take eighty seconds, a drain thirty"


def has_status(driver: Driver, status: str) -> bool:
    try:
        return driver.health().status == status
    except PipelineClosed:
        return False


def test_other_event_loops_are_refused_with_what_to_use() -> None:
    """As under trio, whose runner is not asyncio's either."""
    driver = AsyncDriver("hash-lm")
    with pytest.raises(RuntimeError, match=r"a running event loop of asyncio; .* use Driver or Client in"):
        driver.start().send(None)
    with pytest.raises(PipelineClosed):
        _ = driver.driver.run_dir
