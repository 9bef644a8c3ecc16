"""Defects of oDriver and its scheduler that must not exist here (N-OD-1 to N-OD-17)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from tests.pipeline.checks import expected
from tests.seeds.support import Clock, cpu_seconds, outcome, sequence_of, settle, text_of, trace
from tests.seeds.tiny_engine import drawn_tokens
from tests.waiting import eventually
from tests.workers import tokenizer_zoo
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
from triptych.protocol.errors import InvalidRequest, RequestTooLong, TokenizationFailed
from triptych.workers.summarize.detokenizer import make_detokenizer
from triptych.workers.summarize.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tests.seeds.tiny_engine import TinyEngine


@pytest.mark.parametrize("make", [tokenizer_zoo.byte_level, tokenizer_zoo.llama2], ids=["byte level", "SentencePiece"])
def test_n_od_1_pieces_never_break_a_character_or_lose_a_space(make: object) -> None:
    """The joined pieces of an answer equal the tokenizer's text of all its ids."""
    assert callable(make)
    vocabulary = Vocabulary(make())
    for sentence in tokenizer_zoo.SENTENCES:
        ids = vocabulary.tokenizer.encode(sentence, add_special_tokens=False).ids
        detokenizer = make_detokenizer(vocabulary)
        pieces = [detokenizer.push(token_id) for token_id in ids]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join([*pieces, detokenizer.flush()]) == vocabulary.tokenizer.decode(ids)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_n_od_2_answer_has_exactly_max_tokens(driver: Driver, max_tokens: int) -> None:
    """Not one more, even for max_tokens=1."""
    assert driver.generate([5, 5], max_tokens=max_tokens).token_ids == expected([5, 5], max_tokens)


def test_n_od_3_request_that_ended_on_its_first_token_holds_nothing() -> None:
    """It gets no row, its pages are freed by the release, and it is not in the next step."""
    engine = make_engine(make_sequence(0, num_tokens=4, max_tokens=1), make_sequence(1, max_tokens=3), num_pages=8)
    engine.step()
    assert list(engine.scheduler.live) == [(1, 0)]
    engine.release((0, 0))
    second = engine.step()
    assert second is not None
    assert chunks_of(second.plan) == {1: 1}
    assert engine.stats.num_held_pages + engine.stats.num_free_pages == 8


def test_n_od_4_end_of_one_request_never_ends_the_next_in_its_slot() -> None:
    """Releases have a slot and a generation: a stale one frees nothing of the new request."""
    old, new = make_sequence(0, max_tokens=2), make_sequence(0, max_tokens=20)
    new.key = (0, 1)
    engine = make_engine(old)
    trace(engine)
    engine.add(new)
    engine.step()
    engine.release(old.key)
    engine.release(old.key)
    trace(engine)
    assert new.output_tokens.tolist() == expected_output(new)


def test_n_od_5_stop_does_not_wait_for_requests_that_wait_for_credits() -> None:
    """A drain that times out ends a full queue within seconds."""
    with Driver("hash-lm", hash_step_ms=20.0, max_num_seqs=1) as driver:
        streams = [driver.submit([1, index], max_tokens=4000) for index in range(1, 40)]
        streams[-1].accepted(20)
        clock = Clock()
        driver.stop(mode="drain", timeout=0.2)
        assert clock.s < 8
    assert all(stream.done for stream in streams)


def test_n_od_6_chunk_that_is_not_a_multiple_of_the_page_continues_in_the_half_full_page() -> None:
    """No table entry is overwritten and no page lost."""
    sequence = make_sequence(num_tokens=10, max_tokens=5)
    engine = make_engine(sequence, page_size=4, prefill_chunk=6, num_pages=4)
    engine.step()
    first = list(sequence.block_table)
    engine.step()
    assert sequence.block_table[:2] == first
    assert (len(first), len(sequence.block_table)) == (2, 3)
    run(engine)
    assert sequence.output_tokens.tolist() == expected_output(sequence)


def test_n_od_7_no_page_is_needed_within_a_page() -> None:
    """Decodes in the middle of their pages run with a full pool; if one needs a page, a sequence is preempted."""
    sequences = make_sequences(4, num_tokens=5, max_tokens=3)
    scheduler = make_scheduler(*sequences, num_pages=9, page_size=4, prefill_chunk=32)
    advance(scheduler)
    scheduler.cache.pool.allocate(scheduler.cache.pool.num_free)
    assert len(advance(scheduler).chunks) == 4
    tight = [make_sequence(index, num_tokens=5, max_tokens=20) for index in range(4)]
    outputs = run(make_engine(*tight, num_pages=9, page_size=4))
    assert list(outputs.values()) == [expected_output(s) for s in tight]


def test_n_od_8_decodes_run_while_prompts_keep_arriving() -> None:
    """Twenty steps with a new prompt before each: the decode is in every one of them."""
    scheduler = make_scheduler(make_sequence(0, num_tokens=2, max_tokens=40), num_pages=4096, max_num_seqs=32)
    advance(scheduler)
    for index in range(1, 21):
        scheduler.add(make_sequence(index, num_tokens=50))
        assert chunks_of(advance(scheduler))[0] == 1


def test_n_od_9_idle_pipeline_uses_no_processor_time(driver: Driver) -> None:
    """Less than two percent of a core in each process without requests."""
    settle(driver)
    clock, before = Clock(), {role: cpu_seconds(pid) for role, pid in driver.pids.items()}
    eventually(lambda: clock.s > 1.5, interval=0.1)
    used = {role: cpu_seconds(pid) - before[role] for role, pid in driver.pids.items()}
    assert max(used.values()) < 0.02 * clock.s, used


def test_n_od_10_answer_that_reaches_the_context_ends_with_length(driver: Driver) -> None:
    """Nothing is scheduled beyond the block table."""
    limit = driver.info()["model"]["max_model_len"]
    answer = driver.generate([5] * (limit - 10), max_tokens=None)
    assert answer.token_ids == expected([5] * (limit - 10), 10)
    assert answer.finish_reason == "length"


def test_n_od_11_temperature_zero_is_greedy_in_mixed_steps_too(tiny: TinyEngine) -> None:
    """A greedy prompt that joins sampled decodes gets transformers' greedy tokens, from the first on."""
    sampled = [sequence_of([30 + i, 60], i, max_tokens=20, temperature=5.0) for i in range(3)]
    greedy = sequence_of([70, 71, 72], 3, max_tokens=9)
    engine = tiny.engine(*sampled)
    engine.step()
    engine.add(greedy)
    run(engine)
    assert greedy.output_tokens.tolist() == tiny.greedy([70, 71, 72], 9)


def test_n_od_12_top_p_keeps_the_crossing_token_and_top_k_has_no_cap() -> None:
    """Tokens are sampled from exactly those that transformers' filters keep."""
    logits = torch.linspace(3, 0, 200)
    uniforms = [i / 4000 for i in range(4000)]
    for top_k, top_p in [(60, 1.0), (200, 0.5), (150, 0.05), (120, 0.9)]:
        scores = TopKLogitsWarper(top_k)(torch.empty(0), logits[None])
        kept = TopPLogitsWarper(top_p)(torch.empty(0), scores) if top_p < 1 else scores
        drawn = drawn_tokens(logits, uniforms, top_k=top_k, top_p=top_p)
        assert set(drawn) == set(kept.isfinite().nonzero()[:, 1].tolist())


def test_n_od_13_tokens_are_counted_once_each(driver: Driver) -> None:
    """The count in a piece grows by the tokens it contains, and the total is that of the usage."""
    stream = driver.submit([6, 7], max_tokens=50)
    total = 0
    for delta in stream:
        total += len(delta.token_ids)
        assert delta.num_tokens == total
    assert stream.result().usage["completion_tokens"] == total == 50


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_n_od_14_truncated_prompt_is_truncated_everywhere(driver: Driver, side: str) -> None:
    """The ids that run, the count in the usage and the number cut agree; without truncation, it is refused."""
    prompt = [1 + i % 250 for i in range(5000)]
    with pytest.raises(RequestTooLong, match="prompt has 5000 tokens, the limit is 4095"):
        driver.generate(prompt, max_tokens=6)
    answer = driver.generate(prompt, max_tokens=6, truncation=side)
    kept, cut = answer.usage["prompt_tokens"], answer.usage["truncated_tokens"]
    assert kept + cut == 5000
    head = {"left": 0, "right": kept, "middle": kept // 2}[side]
    assert answer.token_ids == expected(prompt[:head] + prompt[head + cut :], 6)


def test_n_od_15_prompt_that_cannot_be_tokenised_fails_alone(driver: Driver) -> None:
    """A chat template that raises fails only its request; the process and the others continue."""
    other = driver.submit([1, 2], max_tokens=200)
    assert isinstance(outcome(driver.submit(messages=[{"role": "wizard", "content": "x"}])), TokenizationFailed)
    assert isinstance(outcome(driver.submit([1, 258])), InvalidRequest)
    assert other.result(20).token_ids == expected([1, 2], 200)


def test_n_od_16_two_drivers_in_one_process_share_nothing(driver: Driver, slow: Driver) -> None:
    """Both may have a live request with the same id, and each answers its own."""
    first = driver.submit([1, 2], max_tokens=100, request_id="same")
    second = slow.submit([3, 4], max_tokens=5, request_id="same")
    assert second.result(20).token_ids == expected([3, 4], 5)
    assert first.result(20).token_ids == expected([1, 2], 100)
    assert not set(driver.pids.values()) & set(slow.pids.values())


def test_n_od_17_request_fields_are_honoured_or_refused(driver: Driver, tiny: TinyEngine) -> None:
    """Token ids, penalties and stop have their effect; an unknown field is refused with its name."""
    penalty = RepetitionPenaltyLogitsProcessor(1.3)
    [tokens] = tiny.run(sequence_of([80, 81], max_tokens=15, repetition_penalty=1.3))
    assert tokens == tiny.greedy([80, 81], 15, penalty)
    text = text_of(expected([80, 81], 30))
    assert driver.generate([80, 81], max_tokens=30, stop=text[4]).text == text[: text.index(text[4])]
    with pytest.raises(InvalidRequest, match="is_client_side_tokenization"):
        driver.generate([80], is_client_side_tokenization=True)
