"""What AstrAI's InferenceScheduler promises, tested here (R-AA-1 to R-AA-19)."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.checks import expected, random_prompt
from tests.pipeline.raw import ABORT, ACKNOWLEDGE, GET_STATUS, STATUS, RawClient
from tests.proc import is_alive
from tests.seeds.support import end_all, outcome, sequence_of, settle, trace
from tests.waiting import eventually
from tests.workers.execute.factories import (
    advance,
    chunks_of,
    expected_output,
    make_engine,
    make_scheduler,
    make_sequence,
    make_sequences,
    run,
)
from triptych import Driver
from triptych.driver.stream import Completion, Delta, Stream
from triptych.protocol.errors import TriptychError, WorkerDied
from triptych.protocol.sampling import SamplingParams
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.scheduling.rows import Rows
from triptych.workers.execute.step import StepInputs

if TYPE_CHECKING:
    from tests.seeds.tiny_engine import TinyEngine


def status_of(client: RawClient, request_id: str) -> tuple[str, int, int]:
    """State, and times of arrival and end."""
    client.send("follow", GET_STATUS, request_id)
    *_, state, _, received_ns, ended_ns = client.receive("follow", STATUS)
    return state, received_ns, ended_ns


def test_r_aa_1_state_of_a_request_can_be_queried(slow: Driver) -> None:
    """Queued, running, finished or aborted, with the times of arrival and of the end."""
    with RawClient(slow.run_dir) as client:
        first, second, third, last = [client.submit(prompt_token_ids=[1, i], max_tokens=400) for i in range(1, 5)]
        eventually(lambda: status_of(client, first)[0] == "running")
        assert status_of(client, last)[0] == "queued"
        slow.client.abort("nobody")
        done = client.submit(prompt_token_ids=[1], max_tokens=0)
        eventually(lambda: status_of(client, done)[0] == "finished")
        _, received_ns, ended_ns = status_of(client, done)
        assert 0 < received_ns < ended_ns
        for request_id in (first, second, third, last):
            client.send("follow", ABORT, request_id)
        eventually(lambda: status_of(client, last)[0] == "aborted")
        client.send("follow", ACKNOWLEDGE, [first, second, third, last, done])


def test_r_aa_2_defaults_are_in_one_place_and_explicit_values_win(driver: Driver) -> None:
    """``SamplingParams`` has every default; a request's values replace them, and the others stay."""
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (256, 0.0, 1.0, None)
    assert len(driver.generate([1, 2]).token_ids) == 256
    assert len(driver.generate([1, 2], params=SamplingParams(max_tokens=9)).token_ids) == 9
    assert len(driver.generate([1, 2], params=SamplingParams(max_tokens=9), max_tokens=4).token_ids) == 4


@pytest.mark.parametrize("stop_at", [0, 1, 6])
def test_r_aa_3_request_ends_at_max_tokens_or_at_a_stop_id(stop_at: int) -> None:
    """With exact counts: the stop id is the last token."""
    tokens = expected_output(make_sequence(max_tokens=9))
    sequence = make_sequence(max_tokens=9, stop_ids=frozenset({tokens[stop_at]}))
    assert run(make_engine(sequence))[sequence.key] == tokens[: tokens.index(tokens[stop_at]) + 1]
    assert run(make_engine(whole := make_sequence(max_tokens=9)))[whole.key] == tokens


def test_r_aa_4_step_schedules_decodes_first_and_then_prompts() -> None:
    """Finished sequences have freed their rows; then come the decodes, then started prompts, then new ones."""
    scheduler = make_scheduler(*make_sequences(2, num_tokens=2, max_tokens=2), max_num_batched_tokens=10)
    advance(scheduler)
    scheduler.add(make_sequence(2, num_tokens=12))
    scheduler.add(make_sequence(3, num_tokens=3))
    plans = [advance(scheduler) for _ in range(2)]
    assert [list(chunks_of(plan).items()) for plan in plans] == [[(0, 1), (1, 1), (2, 8)], [(2, 4), (3, 3)]]
    assert scheduler.rows.num_free == 4


def test_r_aa_5_limits_are_configurable_enforced_and_reported() -> None:
    """Rows, context and prompt length; an answer that would exceed the context is cut to it."""
    with Driver("hash-lm", max_num_seqs=3, max_model_len=32) as driver:
        assert {"max_num_seqs": 3, "max_model_len": 32, "max_live": 4}.items() <= driver.info()["model"].items()
        stream = driver.submit([1] * 20, max_tokens=100)
        assert stream.accepted(20).max_tokens == 12
        assert (len(stream.result(20).token_ids), stream.result().finish_reason) == (12, "length")
        assert driver.generate([1, 2], max_tokens=5).token_ids == expected([1, 2], 5)
        with pytest.raises(TriptychError, match="prompt has 32 tokens, the limit is 31"):
            driver.generate([1] * 32)


def test_r_aa_6_prompts_of_any_lengths_share_a_batch_without_effect_on_each_other(tiny: TinyEngine) -> None:
    """Each sequence gets the answer that it gets alone and in transformers."""
    prompts = [[60 + i % 90 for i in range(length)] for length in (1, 7, 8, 9, 30, 47)]
    together = tiny.run(*(sequence_of(p, i, max_tokens=10) for i, p in enumerate(prompts)))
    assert together == [tiny.run(sequence_of(p, max_tokens=10))[0] for p in prompts]
    assert together == [tiny.greedy(p, 10) for p in prompts]


def test_r_aa_7_longest_cached_prefix_is_found_and_the_hit_rate_reported(driver: Driver) -> None:
    """Of a prompt that shares 64 tokens with an earlier one, only the rest is computed."""
    prefix = [100 + i % 50 for i in range(64)]
    driver.generate([*prefix, 1, 2], max_tokens=2)
    answer = driver.generate([*prefix, 3, 4], max_tokens=2)
    assert settle(driver)["execute"]["cache_hits"] >= 64
    assert answer.usage["cached_tokens"] == 64


def test_r_aa_8_cached_prefix_is_shared_and_not_copied(slow: Driver) -> None:
    """Two live requests with the same 160 tokens hold fewer than twice their pages."""
    prompt = [5 + i % 60 for i in range(160)]
    streams = [slow.submit(prompt, max_tokens=1000)]
    next(iter(streams[0]))
    streams.append(slow.submit(prompt, max_tokens=1000))
    next(iter(streams[1]))
    held = eventually(lambda: (e := slow.stats()["execute"])["decoding"] == 2 and e["pages_held"])
    end_all(streams)
    assert held < 20


def test_r_aa_9_fully_cached_prompt_computes_one_token(driver: Driver) -> None:
    """Exactly one: without it there are no logits to sample from."""
    prompt = [9 + i % 30 for i in range(65)]
    driver.generate(prompt, max_tokens=1)
    assert driver.generate(prompt, max_tokens=1).usage["cached_tokens"] == 64


def test_r_aa_10_several_prompts_share_a_step() -> None:
    """Wherever each of them begins, up to the token budget of the step."""
    scheduler = make_scheduler(*make_sequences(4, num_tokens=6), max_num_batched_tokens=20)
    assert [chunks_of(advance(scheduler)) for _ in range(2)] == [{0: 6, 1: 6, 2: 6, 3: 2}, {0: 1, 1: 1, 2: 1, 3: 4}]


def test_r_aa_11_every_row_is_sampled_with_its_own_parameters(tiny: TinyEngine) -> None:
    """Including extremes: top_p=0 and top_k=1 are greedy, a top_k beyond the vocabulary and top_p=1 have no effect."""
    prompt = [33, 44, 55]
    greedy = tiny.greedy(prompt, 8)
    kinds: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 0.0}, {"temperature": 0.0, "top_k": 7}]
    free: list[dict[str, Any]] = [{}, {"top_k": 100_000}, {"top_p": 1.0}, {"top_k": 0}, {"top_k": -1}]
    sequences = [sequence_of(prompt, i, **{"temperature": 3.0, **kind}) for i, kind in enumerate([*kinds, *free])]
    for sequence in sequences:
        sequence.seed = 11
    outputs = tiny.run(*sequences, max_num_seqs=8)
    assert outputs[:3] == [greedy] * 3
    assert outputs[3:] == [outputs[3]] * 5
    assert outputs[3] != greedy


def test_r_aa_12_listener_gets_every_token_and_then_one_end(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    """A listener that raises or does not read disturbs no other."""

    class Raises(Stream):
        def on_delta(self, delta: Delta) -> None:
            raise RuntimeError("a consumer's own fault")

    ends: list[object] = []

    class Counts(Stream):
        def on_end(self, completion: Completion, error: TriptychError | None) -> None:
            ends.append(error or completion.finish_reason)
            super().on_end(completion, error)

    unread = driver.submit([1, 2], max_tokens=2000)
    streams = [Raises("raises", driver.client.session), Counts("counts", driver.client.session)]
    with caplog.at_level(logging.CRITICAL):
        for stream in streams:
            driver.client.session.submit(stream.request_id, {"prompt_token_ids": [3, 4], "max_tokens": 50}, stream)
        assert [stream.result(20).token_ids for stream in streams] == [expected([3, 4], 50)] * 2
    assert unread.result(20).token_ids == expected([1, 2], 2000)
    assert ends == ["length"]


def test_r_aa_13_submit_returns_a_unique_id_at_once_and_wakes_the_loop(driver: Driver) -> None:
    """From eight threads at once, and an idle pipeline schedules within milliseconds."""
    ids: list[str] = []

    def submit() -> None:
        streams = [driver.submit([1, 2], max_tokens=1) for _ in range(25)]
        ids.extend(stream.request_id for stream in streams)
        assert all(len(stream.result(20).token_ids) == 1 for stream in streams)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 200
    stages = [driver.generate([1], max_tokens=1).ledger["stages_ms"] for _ in range(20)]
    assert min(s["credit"] + s["schedule"] for s in stages) < 5


def test_r_aa_14_waiting_and_active_requests_can_be_aborted(slow: Driver) -> None:
    """The request gets its end, and a waiting one takes its place."""
    streams = [slow.submit([8, index], max_tokens=3000) for index in range(1, 7)]
    waiting = [slow.submit([9, index], max_tokens=4) for index in (1, 2)]
    next(iter(streams[0]))
    assert {getattr(o, "finish_reason", o) for o in end_all(streams)} == {"abort"}
    assert [each.result(20).token_ids for each in waiting] == [expected([9, 1], 4), expected([9, 2], 4)]


def test_r_aa_15_requests_without_memory_wait_at_the_head_in_order() -> None:
    """Prompts that found no free pages start in the order of their arrival, once there are some."""
    sequences = [make_sequence(0, num_tokens=20, max_tokens=5)]
    sequences += [make_sequence(index, num_tokens=12, max_tokens=2) for index in range(1, 6)]
    engine = make_engine(*sequences, num_pages=8, prefill_chunk=64)
    order = [key[0] for step in trace(engine) for key in step.plan.started]
    assert order == sorted(order)
    assert set(order) == set(range(6))


class Fails(HashRunner):
    """Raises in every step that contains sequence 1."""

    def launch(self, inputs: StepInputs) -> None:
        if any(sequence.key == (1, 0) for sequence in inputs.sampled):
            raise RuntimeError("the fault that was injected")
        super().launch(inputs)


@pytest.mark.parametrize("place", ["step", "process"])
def test_r_aa_16_error_in_the_loop_is_reported_with_its_cause(place: str) -> None:
    """If a step raises, to its request; if the process dies and is not restarted, to all requests."""
    if place == "step":
        sequences = make_sequences(3, max_tokens=6)
        steps = trace(make_engine(*sequences, runner=Fails))
        failed = {key: why for step in steps for key, why in step.progress.failed.items()}
        assert failed == {(1, 0): "RuntimeError: the fault that was injected"}
        assert sequences[2].output_tokens.tolist() == expected_output(sequences[2])
        return
    driver = Driver("hash-lm", max_restarts=0, hash_step_ms=5.0).start()
    pids = driver.pids
    streams = [driver.submit([1, index], max_tokens=4000) for index in range(1, 50)]
    next(iter(streams[0]))
    os.kill(pids["execute"] or 0, signal.SIGSEGV)
    errors = [outcome(stream) for stream in streams]
    assert {str(error).partition(";")[0] for error in errors} == {"worker execute ended with exit code -11"}
    with pytest.raises(WorkerDied, match="execute ended with exit code -11"):
        driver.generate([1])
    driver.stop()
    assert not any(is_alive(pid) for pid in pids.values())


def test_r_aa_17_stop_ends_everything_and_start_begins_anew() -> None:
    """A driver can be started again after a stop, with nothing left of its first run."""
    driver = Driver("hash-lm")
    seen = []
    for _ in range(2):
        assert driver.start().start() is driver
        seen.append((*driver.pids.values(), driver.run_dir))
        eventually(lambda: driver.stats()["prepare"].get("records_used") == 0)
        assert driver.generate([4, 2], max_tokens=3).token_ids == expected([4, 2], 3)
        driver.stop()
    assert not set(seen[0]) & set(seen[1])


def test_r_aa_18_statistics_count_every_request_and_every_token(driver: Driver) -> None:
    """Requests accepted, active and waiting, and the total of generated tokens."""

    def totals() -> tuple[int, int, int]:
        stats = driver.stats()
        return stats["prepare"]["accepted"], stats["execute"]["tokens"], stats["summarize"]["tokens"]

    settle(driver)
    before, rng = totals(), random.Random(18)
    counts = [rng.randrange(1, 60) for _ in range(40)]
    driver.generate_all([{"prompt": random_prompt(rng), "max_tokens": count} for count in counts])
    wanted = (before[0] + 40, before[1] + sum(counts), before[2] + sum(counts))
    eventually(lambda: totals() == wanted)
    assert {"waiting", "decoding"} <= set(driver.stats()["execute"])


def test_r_aa_19_lowest_free_row_is_used_first() -> None:
    """So the rows of a batch stay dense."""
    rows, rng = Rows(8, 4), random.Random(19)
    sequences = make_sequences(8)
    seated: list[int] = []
    for _ in range(500):
        if seated and (rng.random() < 0.5 or len(seated) == 8):
            rows.leave(sequences[seated.pop(rng.randrange(len(seated)))])
        else:
            index = next(i for i in range(8) if i not in seated)
            lowest = min(set(range(8)) - {sequences[i].row for i in seated if sequences[i].row is not None})
            rows.seat(sequences[index])
            assert sequences[index].row == lowest
            seated.append(index)
        rows.check()
