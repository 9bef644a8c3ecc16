"""Keys and values outlive a process of execute, unless it died by its own fault."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import make_nominal_adapter
from tests.pipeline.checks import expected
from tests.pipeline.conftest import hash_driver
from tests.pipeline.killing import has_stepped, kill, num_steps
from tests.waiting import eventually
from triptych import Driver
from triptych.driver.stream import Stream
from triptych.protocol.run_dir import kv_path

NUM_STREAMS, NUM_PROMPT_TOKENS, NUM_TOKENS = 4, 1000, 400
PAGE_SIZE = 16


def prompt(index: int) -> list[int]:
    return [index + 1, 5] * (NUM_PROMPT_TOKENS // 2)


def start(driver: Driver) -> list[Stream]:
    """Long prompts, whose answers have begun."""
    streams = [driver.submit(prompt(index), max_tokens=NUM_TOKENS) for index in range(NUM_STREAMS)]
    for stream in streams:
        next(iter(stream))
    return streams


def check(driver: Driver, streams: list[Stream]) -> int:
    """All answers are exact; how many prompt tokens the present process has computed."""
    for index, stream in enumerate(streams):
        assert stream.result(60).token_ids == expected(prompt(index), NUM_TOKENS)
    return int(driver.stats()["execute"]["prefill_tokens"])


def test_killed_process_leaves_what_it_has_computed() -> None:
    with hash_driver(hash_step_ms=5.0) as driver:
        streams = start(driver)
        for _ in range(2):
            before = num_steps(driver)
            kill(driver, "execute")
            eventually(lambda before=before: has_stepped(driver, before))  # type: ignore[misc]
        assert check(driver, streams) < NUM_STREAMS * PAGE_SIZE


def test_replaced_process_leaves_it_too() -> None:
    with hash_driver(hash_step_ms=5.0) as driver:
        streams = start(driver)
        driver.replace("execute")
        assert check(driver, streams) < NUM_STREAMS * PAGE_SIZE


def test_pages_of_an_adapter_are_those_of_its_weights(tmp_path: Path) -> None:
    """Whatever its name: other weights may get it, with a restart of execute."""
    with hash_driver() as driver:
        driver.load_adapter("a", make_nominal_adapter(tmp_path / "x", b"some weights"))
        driver.generate(prompt(0), max_tokens=1, lora="a")
        kill(driver, "execute")
        again = driver.generate(prompt(0), max_tokens=1, lora="a")
        assert again.usage["cached_tokens"] == NUM_PROMPT_TOKENS // PAGE_SIZE * PAGE_SIZE
        assert again.token_ids == expected(prompt(0), 1, adapter=1)
        driver.unload_adapter("a")
        driver.load_adapter("a", make_nominal_adapter(tmp_path / "y", b"other weights"))
        assert driver.generate(prompt(0), max_tokens=1, lora="a").usage["cached_tokens"] == 0


def test_prefixes_of_answered_requests_are_still_cached() -> None:
    with hash_driver() as driver:
        driver.generate(prompt(0), max_tokens=1)
        kill(driver, "execute")
        answer = driver.generate(prompt(0), max_tokens=1)
        assert answer.usage["cached_tokens"] == NUM_PROMPT_TOKENS // PAGE_SIZE * PAGE_SIZE


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT], ids=lambda number: number.name)
def test_crashed_process_may_have_written_anywhere(number: signal.Signals) -> None:
    with hash_driver(hash_step_ms=5.0) as driver:
        streams, before = start(driver), num_steps(driver)
        os.kill(driver.pids["execute"] or 0, number)
        eventually(lambda: has_stepped(driver, before))
        assert check(driver, streams) >= NUM_STREAMS * NUM_PROMPT_TOKENS


def test_it_can_be_turned_off() -> None:
    with hash_driver(hash_step_ms=5.0, retain_kv=False) as driver:
        streams = start(driver)
        kill(driver, "execute")
        assert check(driver, streams) >= NUM_STREAMS * NUM_PROMPT_TOKENS


def test_real_model_goes_on_with_them(demo_driver: Driver) -> None:
    question: dict[str, Any] = {
        "messages": [{"role": "user", "content": "What does len do?"}],
        "max_tokens": 200,
        "ignore_eos": True,
    }
    undisturbed = demo_driver.generate(**question).token_ids
    stream = demo_driver.submit(**question, cache_salt="another")
    deltas = iter(stream)
    while next(deltas).num_tokens < 3 * PAGE_SIZE:
        pass
    before = num_steps(demo_driver)
    kill(demo_driver, "execute")
    eventually(lambda: has_stepped(demo_driver, before))
    assert stream.result(60).token_ids == undisturbed
    assert demo_driver.stats()["execute"]["prefill_tokens"] <= PAGE_SIZE


def test_memory_counts_as_that_of_execute() -> None:
    """If memory runs out, the kernel ends the process that has most of it mapped: not the driver, which only holds it,
    and without which nothing is restarted.
    """
    with hash_driver() as driver:
        check(driver, start(driver))
        has_mapped = {pid: "triptych-kv" in Path(f"/proc/{pid}/maps").read_text() for pid in driver.pids.values()}
        assert has_mapped == {pid: role == "execute" for role, pid in driver.pids.items()}
        assert "triptych-kv" not in Path("/proc/self/maps").read_text()


def test_nothing_is_left_of_it() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with hash_driver() as driver:
        link = kv_path(driver.run_dir)
        assert os.stat(link).st_blocks
    assert not link.is_symlink()
    assert set(os.listdir("/proc/self/fd")) <= before
