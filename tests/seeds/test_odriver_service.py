"""oDriver, second half: streaming, ends, statistics, stopping and crashes (R-OD-18 to R-OD-34)."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.pipeline.checks import expected, random_prompt
from tests.proc import is_alive
from tests.seeds.support import board_stats, outcome, settle, text_of, trace
from tests.waiting import eventually
from tests.workers.execute.factories import advance, chunks_of, make_engine, make_scheduler, make_sequence
from triptych import Client, Driver
from triptych.driver.stream import Completion
from triptych.protocol.config import CacheConfig
from triptych.protocol.errors import ConfigError, WorkerDied
from triptych.workers.execute.hash_build import SPARE, VOCAB_SIZE

if TYPE_CHECKING:
    from tests.seeds.tiny_engine import TinyEngine


def test_r_od_18_detokenisation_never_stalls_the_step_loop(slow: Driver) -> None:
    """While summarize is stopped, execute continues stepping, and no token is lost when it resumes."""
    stream = slow.submit([1, 2, 3], max_tokens=150)
    next(iter(stream))
    summarize = slow.pids["summarize"]
    assert summarize is not None
    os.kill(summarize, signal.SIGSTOP)
    try:
        steps = board_stats(slow)["execute"]["steps"]
        eventually(lambda: board_stats(slow)["execute"]["steps"] >= steps + 40)
    finally:
        os.kill(summarize, signal.SIGCONT)
    assert stream.result(20).token_ids == expected([1, 2, 3], 150)


def test_r_od_19_first_token_comes_with_the_prefill(driver: Driver) -> None:
    """It needs no decode step; with max_tokens=1 the first piece is the last."""
    engine = make_engine(make_sequence(num_tokens=20, max_tokens=3), prefill_chunk=8)
    assert [(step.plan.num_decodes, len(step.progress.keys)) for step in trace(engine)][:3] == [(0, 0), (0, 0), (0, 1)]
    stream = driver.submit([8, 9], max_tokens=1)
    assert [(delta.num_tokens, delta.token_ids) for delta in stream] == [(1, expected([8, 9], 1))]


def test_r_od_20_every_piece_has_text_ids_rate_and_count(driver: Driver) -> None:
    """The joined pieces are the answer, in text and in ids; the token count grows up to the total."""
    stream = driver.submit([9, 8, 7], max_tokens=300)
    pieces = list(stream)
    whole = stream.result()
    assert whole.token_ids == [i for piece in pieces for i in piece.token_ids] == expected([9, 8, 7], 300)
    assert whole.text == "".join(piece.text for piece in pieces) == text_of(whole.token_ids)
    counts = [piece.num_tokens for piece in pieces]
    assert counts == sorted(counts)
    assert counts[-1] == 300
    assert all(piece.tokens_per_second is None or piece.tokens_per_second > 0 for piece in pieces)


def test_r_od_21_reported_tokens_per_second_equal_those_a_client_measures(slow: Driver) -> None:
    """TPS is (n - 1) / (t_n - t_1), null for one token, and the stages add up to the wall time."""
    stream = slow.submit([1, 2], max_tokens=60)
    arrivals = [(time.monotonic(), delta.num_tokens) for delta in stream]
    (first_s, first), (last_s, last) = arrivals[0], arrivals[-1]
    ledger = stream.result().ledger
    assert 0.5 < ledger["tps"] / ((last - first) / (last_s - first_s)) < 2
    assert sum(ledger["stages_ms"].values()) == pytest.approx(ledger["wall_ms"], rel=0.02)
    assert 0 < ledger["ttft_ms"] < ledger["wall_ms"]
    assert slow.generate([1], max_tokens=1).ledger["tps"] is None


def test_r_od_22_nothing_is_held_after_the_last_end(driver: Driver) -> None:
    """After 300 requests with every kind of end: no row, no credit, no record is in use, and every page is free."""
    rng = random.Random(22)
    prompts = [random_prompt(rng) for _ in range(300)]
    streams = [driver.submit(p, max_tokens=rng.choice([0, 1, 2, 40]), top_k=rng.choice([3, -5])) for p in prompts]
    for stream in streams[::7]:
        stream.abort()
    outcomes = [outcome(stream) for stream in streams]
    assert {type(o).__name__ for o in outcomes} == {"Completion", "InvalidRequest"}
    execute = settle(driver)["execute"]
    assert execute["pages_free"] + execute["pages_cached"] == driver.info()["model"]["num_pages"]


def test_r_od_23_request_that_ends_on_its_first_token_is_never_decoded(driver: Driver) -> None:
    """One piece, one end, one step."""
    steps = settle(driver)["execute"]["steps"]
    first = expected([4, 4, 4], 1)
    stream = driver.submit([4, 4, 4], max_tokens=50, stop_token_ids=first)
    assert [delta.token_ids for delta in stream] == [first]
    assert stream.result().finish_reason == "stop"
    assert settle(driver)["execute"]["steps"] == steps + 1


def test_r_od_24_results_of_an_ended_request_are_dropped() -> None:
    """A late token is matched by slot and generation, so it never reaches the next request in the slot."""
    scheduler = make_scheduler(make_sequence(0))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.release((0, 0))
    successor = make_sequence(0)
    successor.key = (0, 1)
    scheduler.add(successor)
    assert scheduler.apply(plan, [11]).by_key() == {}
    assert successor.num_output_tokens == 0


def test_r_od_25_pipeline_is_ready_after_warm_up_or_fails_to_start(tiny: TinyEngine) -> None:
    """Warming up writes only the trash page; a model that cannot be loaded stops the start and leaves no process."""
    before = [pages.clone() for pages in tiny.pages]
    assert tiny.runner.warm_up() > 0
    assert all(torch.equal(old[1:], new[1:]) for old, new in zip(before, tiny.pages, strict=True))
    driver = Driver("/nowhere/at-all", max_restarts=0)
    pids = driver.start(wait=False).pids
    with pytest.raises(WorkerDied, match="/nowhere/at-all does not exist"):
        driver.start()
    assert not any(is_alive(pid) for pid in pids.values())


def test_r_od_26_statistics_contain_steps_times_and_queues(driver: Driver) -> None:
    """Steps, milliseconds per step, both queues and tokens per second are in ``stats``."""
    driver.generate([1, 2], max_tokens=64)
    eventually(lambda: driver.stats()["summarize"]["tokens_per_second"] > 0)
    eventually(lambda: driver.stats()["execute"]["steps"] >= 64)
    stats = driver.stats()
    assert stats["execute"]["step_ms"] > 0
    assert {"waiting", "live", "pending_bytes"} <= set(stats["prepare"])
    assert {"unread", "live", "tokens"} <= set(stats["summarize"])


def test_r_od_27_saturated_pipeline_stops_with_an_end_for_every_request() -> None:
    """Every unfinished request ends, the processes exit, the run directory is gone; a second stop does nothing."""
    driver = Driver("hash-lm", hash_step_ms=5.0, max_num_seqs=1).start()
    streams = [driver.submit([1, index], max_tokens=4000) for index in range(1, 51)]
    streams[-1].accepted(20)
    pids, run_dir = driver.pids, driver.run_dir
    driver.stop(mode="abort")
    driver.stop()
    outcomes = [outcome(stream, timeout=0) for stream in streams]
    assert [o.finish_reason for o in outcomes if isinstance(o, Completion)] == ["abort"] * 50
    assert not any(is_alive(pid) for pid in pids.values())
    assert not run_dir.exists()


PARENT = """
import sys
from triptych import Driver
driver = Driver("hash-lm").start()
print(*driver.pids.values(), driver.run_dir, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("victim", ["prepare", "execute", "summarize", "driver"])
def test_r_od_28_killed_process_leaves_no_zombie_service(victim: str) -> None:
    """A killed worker is replaced and every answer stays exact; if the driver is killed, all workers die."""
    if victim == "driver":
        parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=-1, stdout=-1, text=True)
        assert parent.stdout is not None
        *pids, run_dir = parent.stdout.readline().split()
        parent.kill()
        parent.communicate()
        shutil.rmtree(run_dir, ignore_errors=True)  # another driver, of another test, may be removing it too
        eventually(lambda: not any(is_alive(int(pid)) for pid in pids), timeout=10)
        return
    with Driver("hash-lm", hash_step_ms=2.0, max_num_seqs=2) as driver:
        streams = [driver.submit([7, index], max_tokens=80) for index in range(1, 7)]
        next(iter(streams[0]))
        os.kill(driver.pids[victim] or 0, signal.SIGKILL)
        answers = [stream.result(60).token_ids for stream in streams]
        assert answers == [expected([7, index], 80) for index in range(1, 7)]
        assert driver.stats()["restarts"][victim] == 1


def test_r_od_29_info_describes_the_model_and_its_limits(driver: Driver) -> None:
    """One question returns model, type, parameters, dtype, batch, context, pages and page size."""
    model = driver.info()["model"]
    assert (model["model"], model["model_type"], model["num_parameters"]) == ("hash-lm", "hash-lm", 0)
    assert (model["max_num_seqs"], model["max_live"], model["max_model_len"]) == (32, 48, 4096)
    assert (model["num_pages"], model["page_size"], model["dtype"]) == (4096, 16, "int64")


def test_r_od_30_page_pool_is_sized_from_memory_and_limited_on_a_cpu() -> None:
    """A share of free memory, or the requested number; if the longest request does not fit, the start is refused."""
    from triptych.workers.execute.model.pool import size_pages

    def pages(free: int, *, length: int = 1 << 20, shrink: bool = True, **cache: Any) -> tuple[int, int]:
        config = CacheConfig(**{"max_kv_bytes": 1 << 30, **cache})
        return size_pages(
            config,
            bytes_per_token=1024,
            available_bytes=free,
            on_cpu=True,
            max_live=48,
            max_model_len=length,
            may_shrink=shrink,
        )

    assert pages(1 << 30)[0] == (1 << 29) // (16 * 1024) - 1  # half of the free memory
    assert pages(1 << 40)[0] == (1 << 30) // (16 * 1024) - 1  # never more than max_kv_bytes
    assert pages(1 << 30, num_pages=7) == (7, 7 * 16)
    with pytest.raises(ConfigError, match="cannot hold one sequence of 200 tokens"):
        pages(1 << 30, num_pages=7, length=200, shrink=False)


def test_r_od_31_special_tokens_are_in_the_ids_and_not_in_the_text(driver: Driver) -> None:
    """Unless the client requests them."""
    prompt = next(p for p in ([1, i] for i in range(1, VOCAB_SIZE)) if expected(p, 1) == [VOCAB_SIZE - 1])
    hidden = driver.generate(prompt, max_tokens=40)
    shown = driver.generate(prompt, max_tokens=40, skip_special_tokens=False)
    assert hidden.token_ids == shown.token_ids == expected(prompt, 40)
    assert SPARE not in hidden.text
    assert hidden.text == text_of(hidden.token_ids)
    assert shown.text.count(SPARE) == shown.token_ids.count(VOCAB_SIZE - 1)


def test_r_od_32_stop_string_over_several_tokens_ends_the_request(driver: Driver) -> None:
    """The text is cut before it, later tokens are dropped, and the pages are freed at once."""
    text = text_of(expected([3, 1, 4], 200))
    start = next(i for i in range(40, 150) if text[i : i + 4].isascii() and text.index(text[i : i + 4]) == i)
    stop = text[start : start + 4]
    stream = driver.submit([3, 1, 4], max_tokens=3000, stop=["never there", stop])
    pieces = [delta.text for delta in stream]
    answer = stream.result()
    assert answer.text == "".join(pieces) == text[:start]
    assert (answer.finish_reason, answer.summary["matched"]) == ("stop", stop)
    assert len(answer.token_ids) < 250
    assert answer.token_ids == expected([3, 1, 4], len(answer.token_ids))


def test_r_od_33_answer_can_be_aborted_at_any_time(slow: Driver) -> None:
    """Waiting, prefilling, decoding, finished, unknown: one end each; a vanished client's request is aborted."""
    streams = [slow.submit([1, index], max_tokens=4000) for index in range(1, 7)]
    next(iter(streams[0]))
    done = slow.generate([1], max_tokens=0)
    for stream in reversed(streams):
        stream.abort()
    answers = [stream.result(20) for stream in streams]
    assert {answer.finish_reason for answer in answers} == {"abort"}
    assert all(a.token_ids == expected([1, i], len(a.token_ids)) for i, a in enumerate(answers, start=1))
    slow.abort(done.request_id)
    slow.abort("unknown")
    with Client(slow.run_dir) as client:
        gone = client.submit([5, 6], max_tokens=4000, lease_s=0.1)
        gone.accepted(20)
    eventually(lambda: slow.client.status(gone.request_id).state in ("aborted", "unknown"))


def test_r_od_34_decodes_may_wait_until_the_batch_is_full() -> None:
    """With decode_join_fill=0.95, decodes join only if no prompt is in progress or the batch is 95 % full."""
    first, second = make_sequence(0, num_tokens=2, max_tokens=9), make_sequence(1, num_tokens=40, max_tokens=3)
    scheduler = make_scheduler(first, second, decode_join_fill=0.95)
    plans = [advance(scheduler) for _ in range(6)]
    assert [0 in chunks_of(plan) for plan in plans] == [True, False, False, False, False, True]
