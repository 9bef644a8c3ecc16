"""kill -9 of every worker under load: no text is lost, doubled or changed."""

from __future__ import annotations

import os
import random
import signal
from itertools import product

import pytest

from tests.pipeline.checks import assert_quiet, expected, random_prompt
from tests.pipeline.conftest import hash_driver
from tests.pipeline.killing import has_stepped, kill, num_steps
from tests.proc import fork_servers_of
from tests.waiting import eventually
from triptych import Driver
from triptych.protocol.board import ROLES

NUM_STREAMS = 32
KILLS_A_ROLE = 10
PAIRS = list(product(ROLES, repeat=2))  # the second is killed during the recovery from the first


def draw_kills(rng: random.Random) -> list[tuple[str, ...]]:
    """Each pair once, and the rest of each role's kills alone, in any order."""
    num_alone = KILLS_A_ROLE - 2 * len(ROLES)
    kills: list[tuple[str, ...]] = [*PAIRS, *num_alone * [(role,) for role in ROLES]]
    rng.shuffle(kills)
    return kills


@pytest.mark.slow
def test_killing_each_worker_ten_times_changes_no_text() -> None:
    rng = random.Random(7)
    prompts = [random_prompt(rng) for _ in range(NUM_STREAMS)]
    with hash_driver(hash_step_ms=32.0, lease_s=30.0) as driver:
        num_tokens = 400
        streams = [driver.submit(prompt, max_tokens=num_tokens) for prompt in prompts]
        for roles in draw_kills(rng):
            before = num_steps(driver)
            for role in roles:
                kill(driver, role)
            eventually(lambda before=before: has_stepped(driver, before) or all(s.done for s in streams))  # type: ignore[misc]
        for prompt, stream in zip(prompts, streams, strict=True):
            completion = stream.result(120)
            assert completion.token_ids == expected(prompt, num_tokens)
            assert completion.finish_reason == "length"
        assert sum(driver.stats()["restarts"].values()) == KILLS_A_ROLE * len(ROLES)
        assert_quiet(driver)


def test_killing_all_three_at_once_changes_no_text(slow: Driver) -> None:
    rng = random.Random(8)
    prompts = [random_prompt(rng) for _ in range(8)]
    streams = [slow.submit(prompt, max_tokens=400) for prompt in prompts]
    for _ in range(3):
        before = num_steps(slow)
        eventually(lambda before=before: has_stepped(slow, before))  # type: ignore[misc]
        for pid in slow.pids.values():
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: slow.healthy)
    for prompt, stream in zip(prompts, streams, strict=True):
        assert stream.result(60).token_ids == expected(prompt, 400)


@pytest.mark.usefixtures("own_servers")
def test_killing_what_forks_workers_changes_no_text() -> None:
    """Before they fork, while they do, and while others do their imports."""
    rng = random.Random(9)
    prompts = [random_prompt(rng) for _ in range(8)]
    with hash_driver(hash_step_ms=4.0, lease_s=30.0) as driver:
        streams = [driver.submit(prompt, max_tokens=400) for prompt in prompts]
        for role in ROLES * 2:
            before, pid = num_steps(driver), eventually(lambda role=role: driver.pids[role])  # type: ignore[misc]
            os.kill(pid, signal.SIGKILL)
            for server in fork_servers_of(driver.run_dir):
                os.kill(server, signal.SIGKILL)
            eventually(lambda before=before: has_stepped(driver, before) or all(s.done for s in streams))  # type: ignore[misc]
        for prompt, stream in zip(prompts, streams, strict=True):
            assert stream.result(60).token_ids == expected(prompt, 400)
        assert_quiet(driver)


def test_time_lost_to_a_kill_is_in_the_ledger(slow: Driver) -> None:
    stream = slow.submit([1, 2, 3], max_tokens=300)
    next(iter(stream))
    kill(slow, "execute")
    stages = stream.result(30).ledger["stages_ms"]
    assert stages["recovered"] > 20
    assert abs(sum(stages.values()) - stream.result().ledger["wall_ms"]) < 0.02 * stream.result().ledger["wall_ms"]


def test_requests_submitted_while_prepare_is_down_are_served(slow: Driver) -> None:
    os.kill(eventually(lambda: slow.pids["prepare"]), signal.SIGKILL)
    streams = [slow.submit([i + 1, 5], max_tokens=5) for i in range(20)]
    assert [s.result(20).token_ids for s in streams] == [expected([i + 1, 5], 5) for i in range(20)]
