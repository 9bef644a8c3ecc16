"""One client cannot slow down the others: many that vanish, a greedy one, a template that hangs."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import Any

import pytest

from tests.pipeline.checks import assert_quiet, expected
from tests.pipeline.conftest import hash_driver
from tests.pipeline.raw import ACCEPTED, ACKNOWLEDGE, FINISHED, REJECTED, SUBMIT, RawClient
from tests.waiting import eventually
from triptych import AsyncClient, Client, Driver
from triptych.protocol.errors import Overloaded, TokenizationFailed
from triptych.protocol.tokenizer_files import FACTS_FILE

NUM_VANISHING = 200
LEASE_S = 1.0
SLACK_S = 4.0  # a step and a tick of a quarter of a second, on a machine that runs ten other things
HANGING = (
    "{% for m in messages %}{% if m.content == 'hang' %}{% for i in range(90000) %}{% for j in range(90000) %}"
    "{% endfor %}{% endfor %}{% endif %}{{ m.content }}{% endfor %}"
)


def test_resources_of_many_vanished_clients_are_freed_within_their_lease() -> None:
    with hash_driver(lease_s=LEASE_S, hash_step_ms=5.0) as driver:
        with RawClient(driver.run_dir) as client:
            for number in range(NUM_VANISHING):
                request = {"prompt_token_ids": [1, 2, 3], "max_tokens": 2000}
                client.send("submit", SUBMIT, f"gone-{number}", request)
            tags = [client.receive("submit", ACCEPTED, REJECTED)[0] for _ in range(NUM_VANISHING)]
        gone = time.monotonic()
        assert tags == [ACCEPTED] * NUM_VANISHING
        eventually(lambda: driver.stats()["prepare"]["records_used"] == 0, timeout=60.0)  # the ends are kept as long
        assert time.monotonic() - gone < 2 * LEASE_S + SLACK_S
        assert_quiet(driver)


def test_one_client_cannot_take_every_place() -> None:
    with hash_driver(max_client_requests=4, hash_step_ms=10.0) as driver:
        streams = [driver.submit([i + 1], max_tokens=2000) for i in range(4)]
        for stream in streams:
            stream.accepted(10)
        with pytest.raises(Overloaded, match="max_client_requests, 4"):
            driver.generate([9], max_tokens=2)
        with Client(driver.run_dir) as another:
            assert another.generate([9], max_tokens=2).token_ids == expected([9], 2)
        for stream in streams:
            stream.abort()
        assert eventually(lambda: served(driver)) == expected([9], 2)


def test_one_client_cannot_fill_the_journal_with_unread_answers() -> None:
    with hash_driver(max_client_requests=2, max_records=8) as driver, RawClient(driver.run_dir) as client:
        request = {"prompt_token_ids": [1], "max_tokens": 1, "lease_s": 86_400.0}
        for number in range(4):
            client.submit(f"unread-{number}", **request)
            client.receive("follow", FINISHED)
            eventually(partial(has_released, driver, number + 1))
        client.send("submit", SUBMIT, "too-many", request)
        assert "4 sequences with unacknowledged ends, the limit is 4" in client.receive("submit", REJECTED)[6]
        assert driver.generate([9], max_tokens=2).token_ids == expected([9], 2)
        client.send("follow", ACKNOWLEDGE, ["unread-0"])
        eventually(lambda: driver.stats()["prepare"]["records_used"] == 3)
        client.submit("one-more", **request)


def test_kept_answers_of_a_list_are_forgotten_one_by_one_or_end_it_once_there_is_no_room_for_more() -> None:
    """A list that waited for room would wait for a whole lease."""
    prompts = [[number] for number in range(1, 11)]
    kept: dict[str, Any] = {"max_tokens": 2, "keep": True, "lease_s": 60.0}
    with hash_driver(max_client_requests=2, max_records=16) as driver:
        with Client(driver.run_dir) as client:
            answers = client.generate_all(prompts, progress=lambda answer: client.forget(answer.request_id), **kept)
            assert [answer.token_ids for answer in answers] == [expected(prompt, 2) for prompt in prompts]
            with pytest.raises(Overloaded, match="8 sequences with unacknowledged ends"):
                client.generate_all(prompts, **kept)

        async def ask() -> None:
            async with AsyncClient(driver.run_dir) as client:
                await client.generate_all(prompts, **kept)

        with pytest.raises(Overloaded, match="8 sequences with unacknowledged ends"):
            asyncio.run(ask())
        with Client(driver.run_dir) as third, pytest.raises(Overloaded, match="full of ended answers"):
            third.generate_all(prompts, **kept)


def has_released(driver: Driver, num_accepted: int) -> bool:
    """Known from statistics that are newer than the last release."""
    stats = driver.stats()["prepare"]
    return bool(stats["accepted"] == num_accepted and stats["live"] == 0)


def served(driver: Driver) -> list[int] | None:
    try:
        return driver.generate([9], max_tokens=2).token_ids
    except Overloaded:
        return None


def test_hanging_template_fails_only_its_own_request() -> None:
    with hash_driver(tokenize_timeout_s=0.5) as driver:
        facts = json.loads((driver.run_dir / FACTS_FILE).read_text())
        (driver.run_dir / FACTS_FILE).write_text(json.dumps({**facts, "chat_template": HANGING}))
        driver.restart("prepare")
        eventually(lambda: driver.stats()["restarts"]["prepare"] == 1)
        hanging = driver.submit(messages=[{"role": "user", "content": "hang"}], max_tokens=2)
        waiting = driver.submit(messages=[{"role": "user", "content": "go on"}], max_tokens=2)
        assert driver.generate([9], max_tokens=2).token_ids == expected([9], 2)
        with pytest.raises(TokenizationFailed, match="tokenize_timeout_s"):
            hanging.result(30)
        assert len(waiting.result(30).token_ids) == 2
        assert driver.stats()["restarts"]["prepare"] == 1
