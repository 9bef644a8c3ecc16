"""Our rule where the reference systems disagree (C-16 to C-30)."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.pipeline.checks import expected
from tests.pipeline.raw import ACKNOWLEDGE, FINISHED, GET_STATS, STATS, RawClient
from tests.seeds.support import outcome, sequence_of, settle, text_of, trace
from tests.seeds.tiny_engine import drawn_tokens
from tests.waiting import eventually
from tests.workers.execute.factories import (
    advance,
    chunks_of,
    expected_hypotheses,
    expected_output,
    make_beams,
    make_engine,
    make_scheduler,
    make_sequence,
    make_sequences,
    run,
)
from triptych import Client, Driver
from triptych.driver.stream import Completion
from triptych.protocol.errors import ConfigError, Draining
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.sampling.adjust import adjust_logits

if TYPE_CHECKING:
    from tests.seeds.tiny_engine import TinyEngine


def test_c_16_filters_are_applied_in_the_order_of_transformers(tiny: TinyEngine) -> None:
    """The distribution of the next token equals that of transformers' processors in the order of ``generate``."""
    ids, count = torch.tensor([[40, 41, 42, 40]]), 20_000
    ours = tiny.logits(ids[0].tolist())[None].div(4)
    processors: Any = LogitsProcessorList([
        RepetitionPenaltyLogitsProcessor(1.7),
        TemperatureLogitsWarper(1.3),
        TopKLogitsWarper(30),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.02),
    ])  # fmt: skip
    wanted = processors(ids, ours.clone())[0].softmax(-1)
    sequence = sequence_of(ids[0].tolist(), repetition_penalty=1.7)
    adjust_logits(ours, [sequence], [sequence.num_tokens], ())
    uniforms = [i / count for i in range(count)]
    drawn = Counter(drawn_tokens(ours[0], uniforms, top_k=30, top_p=0.9, min_p=0.02, temperature=1.3))
    assert set(drawn) == set(wanted.nonzero()[:, 0].tolist())
    assert all(drawn[i] / count == pytest.approx(float(wanted[i]), abs=2e-4) for i in drawn)


def test_c_17_max_tokens_zero_is_an_empty_answer_and_none_fills_the_context(small: Driver) -> None:
    """Every other number is exact; 0 needs no step."""
    lengths = {0: 0, 1: 1, 5: 5, None: 44}
    answers = {n: small.generate([1, 2, 3, 4], max_tokens=n) for n in lengths}
    assert {n: len(answer.token_ids) for n, answer in answers.items()} == lengths
    assert {answer.finish_reason for answer in answers.values()} == {"length"}


def test_c_18_ids_have_the_stop_token_and_the_text_does_not(driver: Driver) -> None:
    """A stop string is left out of the text as well, unless include_stop_str keeps both."""
    tokens = expected([2, 7], 40)
    stop_id = next(i for i in tokens[5:] if 33 <= i <= 127 and tokens.count(i) == 1)
    end = tokens.index(stop_id)
    hidden = driver.generate([2, 7], max_tokens=40, stop_token_ids=[stop_id])
    assert hidden.token_ids == tokens[: end + 1]
    assert hidden.text == text_of(tokens[:end])
    shown = driver.generate([2, 7], max_tokens=40, stop=chr(stop_id - 1), include_stop_str=True)
    assert shown.text == text_of(tokens[: end + 1])


def test_c_19_there_is_exactly_one_terminal_message(driver: Driver) -> None:
    """With its finish_reason and usage, however often a client follows."""
    with RawClient(driver.run_dir) as client:
        ids = [client.submit(prompt_token_ids=[1, n], max_tokens=n) for n in range(1, 30)]
        for request_id in ids * 3:
            client.follow(request_id, 0)
        eventually(lambda: client.receive("follow", FINISHED) and all(client.ends(i) for i in ids))
        client.send("follow", GET_STATS)
        client.receive("follow", STATS)
        assert [len(client.ends(i)) for i in ids] == [1] * 29
        assert all(end[10] == "length" and "ledger" in end[11] for i in ids for end in client.ends(i))
        client.send("follow", ACKNOWLEDGE, ids)


def test_c_20_every_token_is_counted_once_and_recomputed_ones_separately(small: Driver) -> None:
    """Totals equal the tokens of the answers, although preempted sequences computed some of them again."""
    before = settle(small)
    small.generate_all([[2, index] for index in range(1, 9)], max_tokens=40)
    after = settle(small)
    assert after["execute"]["tokens"] == before["execute"]["tokens"] + 8 * 40
    assert after["summarize"]["tokens"] == before["summarize"]["tokens"] + 8 * 40
    assert after["execute"]["prefill_tokens"] > before["execute"]["prefill_tokens"] + 8 * 2
    assert after["execute"]["preemptions"] > before["execute"]["preemptions"]


WRONG: list[dict[str, Any]] = [
    {"prompt": [1, 300]},
    {"prompt": []},
    {"prompt": [1], "top_p": 2.0},
    {"messages": [{"role": "wizard", "content": ""}]},
    {"prompt": "\ud800"},
    {"prompt": "a", "seed": 2**64},
    {"prompt": "a", "stop": object()},
]


@pytest.mark.parametrize("bad", WRONG, ids=lambda bad: ", ".join(bad))
def test_c_21_invalid_request_fails_alone(driver: Driver, bad: dict[str, Any]) -> None:
    """Bad ids, empty prompts, bad values, values that cannot be encoded: only these requests fail."""
    with Client(driver.run_dir) as client:
        good = client.submit([5, 6], max_tokens=1500)
        good.accepted(20)
        assert not isinstance(outcome(client.submit(**bad)), Completion)
        answer = outcome(good)
    assert isinstance(answer, Completion)
    assert answer.token_ids == expected([5, 6], 1500)


def test_c_22_stop_drains_or_aborts() -> None:
    """A drain refuses new requests as draining and finishes accepted ones; those that are too slow end with abort."""
    driver = Driver("hash-lm", hash_step_ms=5.0, max_num_seqs=2).start()
    streams = [driver.submit([1, index], max_tokens=n) for index, n in ((1, 20), (2, 4000))]
    for stream in streams:
        stream.accepted(20)
    assert driver.drain(timeout=0.05) is False
    assert isinstance(outcome(driver.submit([1])), Draining)
    driver.stop(mode="drain", timeout=2.0)
    assert [stream.result(0).finish_reason for stream in streams] == ["length", "abort"]


@pytest.mark.parametrize("seed", range(5))
def test_c_23_release_may_be_lost_doubled_or_late(seed: int) -> None:
    """Pages in limbo are reused under pressure, a stale release changes nothing, and in the end all are free."""
    rng = random.Random(seed)
    sequences = make_sequences(12, num_tokens=7, max_tokens=6)
    engine = make_engine(*sequences[:6], num_pages=12)
    waiting, ended = sequences[6:], []
    while engine.has_work or waiting:
        while waiting and len(engine.scheduler.live) < 6:
            engine.add(waiting.pop(0))
        step = engine.step()
        assert step is not None
        ended += [key for key in step.progress.finished if rng.random() < 0.7]
        for key in rng.sample(ended, len(ended) // 2):
            engine.release(key)
        engine.check()
    assert [s.output_tokens.tolist() for s in sequences] == [expected_output(s) for s in sequences]
    for sequence in sequences:
        engine.release(sequence.key)
    assert engine.stats.num_free_pages == 12


def test_c_24_next_step_can_be_planned_while_one_runs() -> None:
    """With placeholders for the tokens that are not known yet; the texts equal those without overlap."""
    sequences = make_sequences(3, num_tokens=4, max_tokens=6)
    engine = make_engine(*sequences, depth=1)
    for _ in range(2):
        plan = engine.plan()
        assert plan is not None
        engine.launch(plan)
    engine.collect()
    engine.collect()
    run(engine)
    assert [s.output_tokens.tolist() for s in sequences] == [expected_output(s) for s in sequences]


def test_c_25_tokens_kv_reads_and_sequences_are_limited_together() -> None:
    """Every step respects all three limits."""
    sequences = [make_sequence(index, num_tokens=3 + 5 * index, max_tokens=8) for index in range(5)]
    for step in trace(make_engine(*sequences, max_num_batched_tokens=9, max_kv_reads=60, max_num_seqs=4)):
        assert sum(chunk.num_tokens for chunk in step.plan.chunks) <= 9
        assert sum(chunk.start + chunk.num_tokens for chunk in step.plan.chunks) <= 60
        assert step.plan.num_decodes <= 4


def test_c_26_logprobs_are_those_of_the_raw_logits(tiny: TinyEngine) -> None:
    """Before temperature, penalties and filters; the alternatives are the likeliest tokens, best first."""
    prompt = [71, 72, 73]
    sequence = sequence_of(prompt, max_tokens=5, logprobs=3, temperature=2.0, repetition_penalty=1.5)
    for index, step in enumerate(trace(tiny.engine(sequence))):
        raw = tiny.logits([*prompt, *sequence.output_tokens[:index].tolist()]).log_softmax(-1)
        [found] = step.logprobs.values()
        assert found.chosen == pytest.approx(float(raw[sequence.output_tokens[index]]), abs=1e-4)
        best = raw.topk(3)
        assert found.token_ids.tolist() == best.indices.tolist()
        assert torch.allclose(torch.from_numpy(found.logprobs), best.values, atol=1e-4)


def test_c_27_samples_and_beams_are_both_groups(driver: Driver) -> None:
    """``n`` forks once at the first token, a beam search at every step; both are returned as choices."""
    sampled = driver.generate([1, 2], max_tokens=4, n=2, temperature=1.0, seed=3)
    alone = [driver.generate([1, 2], max_tokens=4, temperature=1.0, seed=3 + index) for index in range(2)]
    assert [choice.token_ids for choice in sampled.choices] == [answer.token_ids for answer in alone]
    beams = driver.generate([1, 2], max_tokens=4, num_beams=2, n=2)
    beam, _ = make_beams(0, 2, num_tokens=2, max_tokens=4, stop_ids=frozenset({0}))
    beam.tokens[:2] = [1, 2]
    wanted = expected_hypotheses(beam, VOCAB_SIZE)
    assert [choice.token_ids for choice in beams.choices] == [hypothesis.tokens for hypothesis in wanted]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 256])
def test_c_28_every_power_of_two_is_a_valid_page_size(page_size: int) -> None:
    """The texts do not depend on it; other numbers are refused."""
    sequences = [make_sequence(index, num_tokens=n, max_tokens=20) for index, n in enumerate((3, 40, 64, 65))]
    outputs = run(make_engine(*sequences, page_size=page_size, num_pages=1024 // page_size, prefill_chunk=17))
    assert [outputs[s.key] for s in sequences] == [expected_output(s) for s in sequences]
    with pytest.raises(ConfigError, match="page_size is 48, it must be a power of two"):
        Driver("hash-lm", page_size=48)


def test_c_29_round_robin_serves_the_least_recently_served_first() -> None:
    """Only if more sequences can run than there are rows."""
    scheduler = make_scheduler(*make_sequences(6, num_tokens=2, max_tokens=40), policy="round_robin")
    counts = Counter(key for _ in range(40) for key in chunks_of(advance(scheduler)))
    assert max(counts.values()) - min(counts.values()) <= 2


def test_c_30_one_question_returns_the_statistics_of_all_stages(driver: Driver) -> None:
    """Queues, rows, pages, totals, rates and restarts, with the phase and the epoch of each worker."""
    stats = driver.stats()
    assert {"phase", "epoch", "waiting", "live", "max_live", "accepted", "rejected"} <= set(stats["prepare"])
    assert {"steps", "step_ms", "tokens", "waiting", "decoding", "preemptions", "pages_free"} <= set(stats["execute"])
    assert {"live", "tokens", "tokens_per_second", "finished"} <= set(stats["summarize"])
    pages = {k: v for k, v in stats["execute"].items() if k.startswith("pages")}
    assert pages["pages"] == sum(pages[f"pages_{owner}"] for owner in ("free", "cached", "held", "limbo"))
    assert stats["restarts"] == {"prepare": 0, "execute": 0, "summarize": 0}
