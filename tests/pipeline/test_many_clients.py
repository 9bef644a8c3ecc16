"""Many concurrent clients, and clients that stall or vanish: the others do not notice."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psutil

from tests.pipeline.checks import assert_quiet, expected, random_prompt
from tests.pipeline.conftest import hash_driver
from tests.pipeline.raw import TEXT, RawClient
from tests.waiting import eventually
from triptych import Client, Driver


def test_sixty_four_clients_with_aborts_and_disconnects_leave_nothing_behind() -> None:
    with hash_driver(lease_s=3.0, num_pages=300, hash_step_ms=0.5) as driver:
        run_dir = driver.run_dir
        outcomes: Counter[str] = Counter()

        def live(seed: int) -> None:
            rng = random.Random(seed)
            with Client(run_dir) as client:
                for _ in range(6):
                    prompt, num_tokens = random_prompt(rng), rng.randrange(1, 60)
                    stream = client.submit(prompt, max_tokens=num_tokens)
                    kind = rng.choice(["read", "read", "abort", "vanish"])
                    if kind == "vanish":
                        stream.accepted(60)
                        outcomes["vanished"] += 1
                        return
                    if kind == "abort":
                        stream.abort()
                    completion = stream.result(60)
                    assert completion.token_ids == expected(prompt, len(completion.token_ids))
                    assert completion.finish_reason == "abort" or len(completion.token_ids) == num_tokens
                    outcomes[completion.finish_reason] += 1

        with ThreadPoolExecutor(64) as pool:
            list(pool.map(live, range(64)))
        assert min(outcomes[k] for k in ("length", "abort", "vanished")) > 0
        assert_quiet(driver)
        processes = [psutil.Process(pid) for pid in driver.pids.values() if pid]
    assert not run_dir.exists()
    assert not [p for p in processes if p.is_running()]


def test_request_outlives_its_client_and_is_resumed_by_another(slow: Driver) -> None:
    with Client(slow.run_dir) as first:
        stream = first.submit([5, 6], max_tokens=200, request_id="handed-over")
        delta = next(iter(stream))
    with Client(slow.run_dir) as second:
        rest = second.resume("handed-over", num_tokens=len(delta.token_ids), num_chars=len(delta.text))
        assert delta.token_ids + rest.result(30).token_ids == expected([5, 6], 200)


def test_client_that_does_not_read_stalls_no_one() -> None:
    with hash_driver(window_tokens=64, lease_s=60.0) as driver, RawClient(driver.run_dir, receive_limit=1) as stalled:
        ids = [stalled.submit(prompt="a", max_tokens=2000) for _ in range(8)]
        prompt = [3, 1, 4]
        assert driver.generate(prompt, max_tokens=500).token_ids == expected(prompt, 500)
        # The stalled client's answers are computed and kept, and sent only up to its window.
        eventually(lambda: driver.stats()["summarize"]["unread"] == 8)
        stalled.collect("follow", 0.2)
        rows = [row for frame in stalled.received["follow"] if frame[0] == TEXT for row in frame[4]]
        assert {row[0] for row in rows} == set(ids)
        assert all(row[1] + len(row[3]) // 4 <= 64 for row in rows)
