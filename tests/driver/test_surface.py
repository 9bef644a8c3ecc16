"""The four classes of the package have the same methods with the same arguments, and say what they are."""

from __future__ import annotations

import asyncio
import doctest
import inspect
import re
import sys
from typing import Any

import pytest

import triptych
from tests.pipeline.conftest import hash_driver
from triptych import AsyncClient, AsyncDriver, Client, Driver
from triptych.driver.async_requests import AsyncRequests
from triptych.driver.async_stream import AsyncStream
from triptych.driver.requests import Requests
from triptych.driver.stream import Stream
from triptych.protocol.errors import RequestTimeout

# What only one of two has, and why.
ONLY_SYNC: dict[type, set[str]] = {
    Driver: {  # found at ``AsyncDriver.driver``: they return at once
        "abandon", "healthy", "keeps_journal", "num_left", "num_unanswered", "phases", "pids", "restart",
    },
    Stream: {"on_done"},  # a task may await the result
}  # fmt: skip
ONLY_ASYNC: dict[type, set[str]] = {AsyncStream: {"take"}}  # a thread reads delta by delta as fast
OWN_ARGUMENTS = {"AsyncDriver.start": "shows no progress", "AsyncDriver.stop": "returns None"}
PAIRS = [(Client, AsyncClient), (Driver, AsyncDriver), (Stream, AsyncStream), (Requests, AsyncRequests)]


def public(owner: type) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in dir(owner) if not name.startswith("_")}


def arguments(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda owner: owner.__name__)
def test_asyncio_has_the_same_methods(one: type, other: type) -> None:
    missing = set(public(one)) - set(public(other)) - {"on_accepted", "on_delta", "on_end"}
    assert missing == ONLY_SYNC.get(one, set())
    assert set(public(other)) - set(public(one)) - {"driver"} == ONLY_ASYNC.get(other, set())


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda owner: owner.__name__)
def test_methods_of_asyncio_take_the_same_arguments(one: type, other: type) -> None:
    for name, method in public(one).items():
        if name in public(other) and callable(method) and f"{other.__name__}.{name}" not in OWN_ARGUMENTS:
            assert arguments(method) == arguments(getattr(other, name)), name


def test_driver_does_with_requests_what_a_client_does() -> None:
    assert all(issubclass(owner, Requests) for owner in (Driver, Client))
    assert all(issubclass(owner, AsyncRequests) for owner in (AsyncDriver, AsyncClient))


@pytest.mark.parametrize("name", ["AsyncClient", "AsyncDriver", "Client", "Driver", "PipelineConfig", "SamplingParams"])
def test_public_class_shows_how_it_is_used(name: str) -> None:
    assert re.search(rf">>> .*\b{name}[.(]", getattr(triptych, name).__doc__ or "")


def test_all_names_are_there_and_are_listed() -> None:
    assert set(triptych.__all__) == set(triptych._HOMES)
    assert {getattr(triptych, name).__name__ for name in triptych.__all__} == set(triptych.__all__)
    assert set(triptych.__all__) <= set(dir(triptych))


def test_driver_and_clients_show_what_they_are_connected_to() -> None:
    driver = hash_driver()
    assert repr(driver) == "<Driver of hash-lm, not started>"
    with driver:
        assert repr(driver) == f"<Driver of hash-lm, {driver.run_dir}, running>"
        with Client(driver.run_dir) as client:
            assert repr(client) == f"<Client of {driver.run_dir}>"
            assert repr(AsyncClient(client=client)) == f"<AsyncClient of {driver.run_dir}>"
        assert repr(client) == f"<Client of {driver.run_dir}, closed>"
    assert repr(AsyncDriver("hash-lm")) == "<AsyncDriver of hash-lm, not started>"


def test_answer_that_takes_too_long_is_aborted_in_asyncio_too() -> None:
    async def main() -> None:
        async with AsyncDriver(config=hash_driver(hash_step_ms=20).config) as driver:
            with pytest.raises(RequestTimeout, match=r"no answer within 0.1 s"):
                await driver.generate([1], max_tokens=3000, ignore_eos=True, timeout=0.1)
            while not (ended := (await driver.requests()).ended):  # on a loaded machine it may not be accepted yet
                assert driver.health().status == "ok"
            assert ended[0].state == "abort"

    asyncio.run(main())


@pytest.mark.parametrize("name", triptych.__all__)
def test_examples_of_the_docstrings_are_true(name: str) -> None:
    assert doctest.testmod(sys.modules[getattr(triptych, name).__module__]).failed == 0
