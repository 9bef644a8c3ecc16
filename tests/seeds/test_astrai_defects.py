"""Defects of AstrAI's scheduler that must not exist here (N-AA-1 to N-AA-16)."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest

from tests.pipeline.checks import expected, random_prompt
from tests.pipeline.raw import ABORT, ACKNOWLEDGE, FINISHED, RawClient
from tests.proc import is_alive
from tests.seeds.support import end_all, outcome, sequence_of, text_of, trace
from tests.waiting import eventually
from tests.workers.execute.factories import (
    chunks_of,
    make_engine,
    make_sequence,
    make_sequences,
)
from triptych import Driver
from triptych.protocol.errors import RequestTooLong
from triptych.workers.execute.batch import build_inputs

if TYPE_CHECKING:
    from tests.seeds.tiny_engine import TinyEngine


@pytest.mark.parametrize("length", [1, 2, 8, 33])
def test_n_aa_1_last_prompt_token_is_computed_once(tiny: TinyEngine, length: int) -> None:
    """The greedy answer equals that of transformers from the first token on, for every prompt length."""
    prompt = [45 + 2 * i % 90 for i in range(length)]
    assert tiny.run(sequence_of(prompt, max_tokens=6)) == [tiny.greedy(prompt, 6)]


def test_n_aa_2_sequences_of_different_lengths_are_decoded_in_every_step() -> None:
    """With lengths 9, 9, 9 and 3, each sequence gets a token per step, and no prompt is computed twice."""
    sequences = [make_sequence(i, num_tokens=n, max_tokens=20) for i, n in enumerate((9, 9, 9, 3))]
    steps = trace(make_engine(*sequences, prefill_chunk=16, max_num_batched_tokens=40))
    assert [chunks_of(step.plan) for step in steps[1:]] == [dict.fromkeys(range(4), 1)] * 19
    assert sum(step.plan.num_prefill_tokens for step in steps) == 30


def test_n_aa_3_rows_tables_and_slots_belong_to_the_same_sequence() -> None:
    """After rows were freed and taken in another order, each token is written to the page of its own sequence."""
    sequences = make_sequences(6, num_tokens=6, max_tokens=30)
    engine = make_engine(*sequences[:4])
    engine.step()
    engine.step()
    for key in (2, 0):
        engine.release((key, 0))
    for sequence in sequences[4:]:
        engine.add(sequence)
    engine.step()
    engine.step()
    scheduler = engine.scheduler
    plan = engine.plan()
    assert plan is not None
    assert [sequences[chunk.key[0]].row for chunk in plan.chunks] == [0, 1, 2, 3]
    inputs = build_inputs(plan, scheduler.running, scheduler.rows, page_size=4)
    for chunk, slot in zip(plan.chunks, inputs.slot_mapping.tolist(), strict=True):
        assert slot // 4 == sequences[chunk.key[0]].block_table[chunk.start // 4]


def test_n_aa_4_nothing_of_a_page_survives_into_its_next_use(small: Driver) -> None:
    """Hundreds of answers from twelve pages, with prompts that share prefixes, are all exact."""
    rng = random.Random(4)
    prompts = [[7, 7, 7, 7][: rng.randrange(5)] + random_prompt(rng, 1, 30) for _ in range(150)]
    answers = small.generate_all(prompts, max_tokens=9)
    assert [answer.token_ids for answer in answers] == [expected(prompt, 9) for prompt in prompts]


def test_n_aa_5_end_of_the_context_ends_one_answer_and_not_the_loop(small: Driver) -> None:
    """Its finish_reason is length; later requests do not hang."""
    answers = [outcome(small.submit([3] * n, max_tokens=None), timeout=20) for n in (47, 40, 1)]
    assert [getattr(a, "finish_reason", a) for a in answers] == ["length"] * 3
    assert [len(a.token_ids) for a in answers] == [1, 8, 47]  # type: ignore[union-attr]
    assert small.generate([4], max_tokens=3, timeout=20).token_ids == expected([4], 3)


def test_n_aa_6_stop_waits_for_the_workers_and_leaves_no_one_waiting() -> None:
    """A draining stop finishes accepted requests; afterwards, none of its processes and threads exist."""
    before = set(threading.enumerate())
    driver = Driver("hash-lm", hash_step_ms=2.0).start()
    pids = driver.pids
    streams = [driver.submit([1, index], max_tokens=20) for index in range(1, 21)]
    streams[-1].accepted(20)
    driver.stop()
    assert [stream.result(0).token_ids for stream in streams] == [expected([1, index], 20) for index in range(1, 21)]
    assert not any(is_alive(pid) for pid in pids.values())
    assert set(threading.enumerate()) <= before


def test_n_aa_7_cache_lookup_and_eviction_can_run_concurrently(small: Driver) -> None:
    """Four client threads with related prompts on a pool that is always full: no error, no endless loop."""
    wrong: list[object] = []

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(25):
            prompt = [5, 6, 7, 8] * rng.randrange(1, 8) + [1 + rng.randrange(3)]
            answer = outcome(small.submit(prompt, max_tokens=6))
            if getattr(answer, "token_ids", answer) != expected(prompt, 6):
                wrong.append(answer)

    threads = [threading.Thread(target=ask, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_n_aa_8_single_stream_is_not_delayed_by_sleeps(driver: Driver) -> None:
    """More than 200 tokens per second through all three processes, and an idle pipeline answers within milliseconds."""
    rates = [driver.generate([1, 2], max_tokens=60).ledger["tps"] for _ in range(10)]
    assert max(rates) > 250
    assert min(driver.generate([1, 2], max_tokens=1).ledger["ttft_ms"] for _ in range(10)) < 10


def test_n_aa_9_temperature_zero_is_greedy(tiny: TinyEngine) -> None:
    """Zero and almost zero choose the likeliest token without a division by zero."""
    prompt = [90, 91, 92]
    outputs = tiny.run(*(sequence_of(prompt, i, max_tokens=7, temperature=t) for i, t in enumerate((0.0, 1e-30, 1e-6))))
    assert outputs == [tiny.greedy(prompt, 7)] * 3


def test_n_aa_10_no_prompt_is_truncated_unasked(driver: Driver) -> None:
    """It is refused with both numbers; if truncation was requested, the answer says by how much."""
    with pytest.raises(RequestTooLong, match="prompt has 4096 tokens, the limit is 4095"):
        driver.generate([1] * 4096)
    stream = driver.submit([1] * 4096, truncation="left", max_tokens=1)
    assert stream.accepted(20).num_truncated_tokens == stream.result(20).usage["truncated_tokens"] > 0


def test_n_aa_11_end_of_sequence_is_not_streamed_as_text(demo: Driver) -> None:
    """An answer that ends by itself has the id in its tokens but not in its text."""
    stream = demo.submit(messages=[{"role": "user", "content": "What does len do?"}], max_tokens=200)
    text = "".join(delta.text for delta in stream)
    answer = stream.result()
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] in demo.info()["model"]["eos_token_ids"]
    assert answer.text == text == text.rstrip()
    assert "<|" not in text


def test_n_aa_12_pieces_end_between_characters(driver: Driver) -> None:
    """Random bytes, including two, three and four byte characters: the pieces joined are the whole text."""
    for seed in range(5):
        stream = driver.submit(random_prompt(random.Random(seed)), max_tokens=200)
        pieces = [delta.text for delta in stream]
        assert "".join(pieces) == stream.result().text == text_of(stream.result().token_ids)


def test_n_aa_13_aborted_request_is_marked_and_its_client_notified(slow: Driver) -> None:
    """The finish_reason is abort, and so is the state until the client has acknowledged it."""
    with RawClient(slow.run_dir) as client:
        request_id = client.submit(prompt_token_ids=[1, 2], max_tokens=4000)
        eventually(lambda: slow.client.status(request_id).state == "running")
        client.send("follow", ABORT, request_id)
        assert client.receive("follow", FINISHED)[10] == "abort"
        assert slow.client.status(request_id).state == "aborted"
        client.send("follow", ACKNOWLEDGE, [request_id])
    eventually(lambda: slow.client.status(request_id).state == "unknown")


def test_n_aa_14_clients_of_many_threads_need_no_lock(driver: Driver) -> None:
    """Eight threads share one client: every answer belongs to its own prompt."""
    answers: dict[int, list[list[int]]] = {}

    def ask(index: int) -> None:
        answers[index] = [driver.generate([index, n], max_tokens=8).token_ids for n in range(1, 16)]

    threads = [threading.Thread(target=ask, args=[index]) for index in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {i: [expected([i, n], 8) for n in range(1, 16)] for i in range(1, 9)}


def test_n_aa_15_pages_are_allocated_for_tokens_and_not_for_max_tokens(slow: Driver) -> None:
    """A request with max_tokens=4000 holds only the page of its few tokens."""
    stream = slow.submit([1, 2, 3], max_tokens=4000)
    next(iter(stream))
    held = eventually(lambda: slow.stats()["execute"]["pages_held"])
    assert held <= 4
    end_all([stream])


def test_n_aa_16_partial_prefix_match_does_not_change_the_answer(driver: Driver) -> None:
    """For every length of the common prefix around page borders, sequentially and concurrently."""
    base = [1 + i % 120 for i in range(50)]
    prompts = [[*base[:common], 200, 201, 202] for common in (1, 15, 16, 17, 31, 32, 33, 48)]
    assert [driver.generate(p, max_tokens=20).token_ids for p in prompts] == [expected(p, 20) for p in prompts]
    answers = driver.generate_all([base, *prompts], max_tokens=20)
    assert [answer.token_ids for answer in answers] == [expected(p, 20) for p in (base, *prompts)]
