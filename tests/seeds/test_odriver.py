"""oDriver, first half: three processes, admission, chunks, pages and rows (R-OD-1 to R-OD-17)."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from tests.pipeline.checks import expected
from tests.pipeline.raw import GET_INFO, INFO, REJECTED, SUBMIT, RawClient
from tests.seeds.support import Clock, end_all, outcome, sequence_of, trace
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
from triptych import Client, Driver
from triptych.protocol.codec import decode, encode
from triptych.protocol.errors import Overloaded, RequestTooLong
from triptych.protocol.messages import Abort, Accepted, Rejected
from triptych.workers.execute.scheduling.sequence import SequenceState

if TYPE_CHECKING:
    from tests.seeds.tiny_engine import TinyEngine


def test_r_od_1_three_processes_run_behind_one_driver(driver: Driver) -> None:
    """Prepare, execute and summarize are separate processes, ready when ``start`` returns."""
    pids, stats = driver.pids, driver.stats()
    assert list(pids) == ["prepare", "execute", "summarize"]
    assert len({*pids.values(), os.getpid()}) == 4
    for role, pid in pids.items():
        assert f"workers.{role}" in Path(f"/proc/{pid}/cmdline").read_text()
        assert stats[role]["phase"] == "ready"


def test_r_od_2_second_start_changes_nothing(driver: Driver) -> None:
    """``start`` of a running driver returns it with the same processes."""
    before = driver.pids
    assert driver.start() is driver
    assert driver.pids == before


def test_r_od_3_malformed_request_is_answered_and_the_next_one_served(driver: Driver) -> None:
    """Garbage, unknown fields and wrong types get an error that names the field, and no other request is affected."""
    rng = random.Random(3)
    with RawClient(driver.run_dir) as client:
        for _ in range(1000):
            client.send_bytes("submit", rng.randbytes(rng.randrange(80)))
            assert client.receive("submit", REJECTED)[5] == "bad_frame"
        for field, value in {"max_tokens": "ten", "top_q": 1, "stop": 7, "temperature": -1}.items():
            client.send("submit", SUBMIT, f"bad-{field}", {"prompt": "a", field: value})
            frame = client.receive("submit", REJECTED)
            assert frame[4:8:3] == [f"bad-{field}", field]
            assert frame[5] == "invalid_request"
        client.send("submit", GET_INFO)
        assert client.receive("submit")[0] == INFO
    assert driver.generate([5, 6], max_tokens=3).token_ids == expected([5, 6], 3)


def aborts_what_was_refused(run_dir: Path) -> bool:
    """Whether a client aborts a request that was refused first, but accepted from a repeated SUBMIT."""
    context = zmq.Context()
    routers = {name: context.socket(zmq.ROUTER) for name in ("submit", "follow")}
    for name, socket in routers.items():
        socket.setsockopt(zmq.RCVTIMEO, 2000)
        socket.bind(f"ipc://{run_dir / name}")
    try:
        with Client(run_dir) as client:
            stream = client.submit([1, 2])
            peer, _ = routers["submit"].recv_multipart()
            for message in (
                Rejected(stream.request_id, "overloaded", "full", None),
                Accepted(stream.request_id, 2, 0, 256),
            ):
                routers["submit"].send_multipart([peer, encode(message)])
            assert isinstance(outcome(stream), Overloaded)
            while True:
                _, frame = routers["follow"].recv_multipart()
                if decode(frame).message == Abort(stream.request_id):
                    return True
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("answer", ["prompt", "late"])
def test_r_od_4_submit_never_blocks_the_caller(slow: Driver, tmp_path: Path, answer: str) -> None:
    """500 submits to a saturated pipeline take less than a second; those beyond the queue are refused, and stay so."""
    if answer == "late":
        assert aborts_what_was_refused(tmp_path)
        return
    clock = Clock()
    streams = [slow.submit([1, 2], max_tokens=4000) for _ in range(500)]
    assert clock.s < 1.0
    refused = 0
    for stream in streams:
        try:
            stream.accepted(20)
        except Overloaded:
            refused += 1
    assert 500 - 64 - 2 * 3 <= refused <= 500 - 64  # a queue of 64, and up to three live ones
    end_all(streams)


def test_r_od_5_equal_prompts_get_their_first_tokens_in_order_of_submission() -> None:
    """The queue is first in, first out; an aborted request is skipped and the order kept."""
    engine = make_engine(*make_sequences(6, num_tokens=5), max_num_batched_tokens=5)
    engine.release((2, 0))
    order = [key[0] for step in trace(engine) for key in step.plan.started]
    assert order == [0, 1, 3, 4, 5]


def test_r_od_6_at_most_three_halves_of_the_rows_are_live(slow: Driver) -> None:
    """``max_live`` is max(B + 1, 3B // 2), never exceeded, and every credit is returned exactly once."""
    streams = [slow.submit([1, index], max_tokens=30) for index in range(1, 9)]
    seen = set()
    while not all(stream.done for stream in streams):
        prepare = slow.stats()["prepare"]
        seen.add(prepare["live"])
    assert prepare["max_live"] == 3
    assert max(seen) == 3
    eventually(lambda: slow.stats()["prepare"]["live"] == 0)


def test_r_od_7_used_and_maximum_rows_are_reported(slow: Driver) -> None:
    """The statistics have rows in use, live sequences and their limit; all zero when idle."""
    streams = [slow.submit([1, index], max_tokens=4000) for index in range(1, 5)]
    eventually(lambda: (slow.stats()["execute"]["decoding"], slow.stats()["prepare"]["live"]) == (2, 3))
    assert slow.stats()["prepare"]["max_live"] == slow.info()["model"]["max_live"] == 3
    end_all(streams)
    eventually(lambda: (slow.stats()["execute"]["decoding"], slow.stats()["prepare"]["live"]) == (0, 0))


def test_r_od_8_giant_prompt_is_tokenised_while_others_are_served(driver: Driver) -> None:
    """Megabytes in the tokenizer delay neither the step loop nor other requests."""
    giant = driver.submit("x" * 4_000_000)
    answered = 0
    while not giant.done:
        assert driver.generate([3, 4], max_tokens=2, timeout=20).token_ids == expected([3, 4], 2)
        answered += 1
    assert answered >= 5
    assert isinstance(outcome(giant), RequestTooLong)


def test_r_od_9_each_request_of_a_mixed_batch_has_its_own_sampling(tiny: TinyEngine) -> None:
    """Each request gets in a batch what it gets alone, and each parameter has an effect."""
    prompt = [40, 41, 42, 43]
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.8},
        {"frequency_penalty": -2.0, "presence_penalty": -2.0},
        {"temperature": 1.5},
        {"temperature": 1.5, "top_k": 5},
        {"logit_bias": {9: 100.0}},
    ]
    alone = [tiny.run(sequence_of(prompt, max_tokens=24, **kind))[0] for kind in kinds]
    together = [sequence_of(prompt, index, max_tokens=24, **kind) for index, kind in enumerate(kinds)]
    for sequence in together:
        sequence.seed = 0
    assert tiny.run(*together) == alone
    assert alone[0] == tiny.greedy(prompt, 24)
    assert len({tuple(tokens) for tokens in alone}) == len(kinds)


@pytest.mark.parametrize("num_tokens", [1, 511, 512, 513, 1024, 1025])
def test_r_od_10_long_prompts_are_computed_in_chunks_of_512(num_tokens: int) -> None:
    """A prompt of L tokens takes ceil(L / 512) chunks, and its text equals that of a single chunk."""
    sequence = make_sequence(num_tokens=num_tokens, max_tokens=4)
    engine = make_engine(sequence, prefill_chunk=512, page_size=16, num_pages=128)
    sizes = [chunk.num_tokens for step in trace(engine) for chunk in step.plan.chunks[step.plan.num_decodes :]]
    assert sizes == [512] * (num_tokens // 512) + [num_tokens % 512] * (num_tokens % 512 > 0)
    assert sequence.output_tokens.tolist() == expected_output(sequence)


def test_r_od_11_plan_is_a_plain_value_that_can_be_dumped_and_replayed() -> None:
    """Planning touches no device, gives the same plans again, and returns None if there is nothing to do."""
    dumps = []
    for _ in range(2):
        scheduler = make_scheduler(*make_sequences(5, num_tokens=11), num_pages=24)
        plans = [advance(scheduler) for _ in range(12)]
        dumps.append([json.dumps(dataclasses.asdict(plan)) for plan in plans])
    assert dumps[0] == dumps[1]
    assert make_scheduler().plan() is None


def test_r_od_12_step_may_contain_a_prompt_chunk_and_all_decodes() -> None:
    """Mixed steps happen and give the text of pure ones."""
    sequences = make_sequences(3, num_tokens=4, max_tokens=12)
    engine = make_engine(*sequences[:2])
    engine.step()
    engine.add(sequences[2])
    mixed = engine.step()
    assert mixed is not None
    assert chunks_of(mixed.plan) == {0: 1, 1: 1, 2: 4}
    run(engine)
    assert [s.output_tokens.tolist() for s in sequences] == [expected_output(s) for s in sequences]


def test_r_od_13_request_goes_from_waiting_to_ready_to_decoding() -> None:
    """If every row is taken when its prompt ends, the sequence waits as ready, with its pages, for a free row."""
    first, second = make_sequence(0, num_tokens=4, max_tokens=6), make_sequence(1, num_tokens=12, max_tokens=3)
    engine = make_engine(first, second, max_num_seqs=1)
    states = [second.state]
    trace(engine, each=lambda step: states.append(second.state))
    assert list(dict.fromkeys(states)) == [
        state for state in SequenceState if state.value not in ("swapped", "paused", "ending")
    ]


def test_r_od_14_block_table_contains_the_sequence_s_own_pages_in_order() -> None:
    """Page 0 is never allocated, no page is in two tables, and a chunk continues in the half-full page."""
    sequences = make_sequences(4, num_tokens=13, max_tokens=9)
    engine = make_engine(*sequences, prefill_chunk=5)
    before: dict[int, list[int]] = {}

    def look(_: object) -> None:
        tables = {s.key[0]: list(s.block_table) for s in engine.scheduler.running.values()}
        pages = [page for table in tables.values() for page in table]
        assert len(set(pages)) == len(pages)
        assert 0 not in pages
        assert all(table[: len(before.get(index, []))] == before.get(index, []) for index, table in tables.items())
        before.clear()
        before.update(tables)

    trace(engine, each=look)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_r_od_15_decode_gets_a_page_exactly_when_it_needs_one(page_size: int) -> None:
    """Pages held are always ceil(length / page size); at the limit of the context, the finish_reason is length."""
    sequence = make_sequence(num_tokens=6, max_tokens=100)
    engine = make_engine(sequence, page_size=page_size, max_model_len=40)
    held = []
    trace(engine, each=lambda _: held.append((sequence.num_computed_tokens, len(sequence.block_table))))
    assert held[:-1] == [(n, -(-n // page_size)) for n in range(6, 39)]
    assert (sequence.finish_reason, sequence.num_tokens) == ("length", 40)


def test_r_od_16_requests_of_different_lengths_advance_together() -> None:
    """A batch takes as many steps as its longest member, and a free row is reused in the next step."""
    sequences = [make_sequence(index, num_tokens=n, max_tokens=10) for index, n in enumerate((1, 5, 9, 20))]
    late = make_sequence(4, num_tokens=3, max_tokens=2)
    engine = make_engine(*sequences, late, prefill_chunk=64)
    steps = trace(engine)
    assert len(steps) <= 10 + 2
    assert [chunks_of(step.plan) for step in steps[2:9]] == [{0: 1, 1: 1, 2: 1, 3: 1}] * 7
    assert all(s.output_tokens.tolist() == expected_output(s) for s in (*sequences, late))


def test_r_od_17_every_end_of_sequence_id_ends_an_answer(tiny: TinyEngine) -> None:
    """Ids of the tokenizer and of the generation config all end with stop, even as the first token."""
    assert tiny.card.eos_token_ids == (2, 7)
    ends = frozenset(tiny.card.eos_token_ids)
    ended = [sequence_of([50, 51], i, stop_ids=ends, logit_bias={i: 100.0}) for i in tiny.card.eos_token_ids]
    ignoring = sequence_of([50, 51], 3, max_tokens=5, ignore_eos=True, logit_bias={2: 100.0})
    assert tiny.run(*ended, ignoring) == [[2], [7], [2] * 5]
    assert [s.finish_reason for s in (*ended, ignoring)] == ["stop", "stop", "length"]
