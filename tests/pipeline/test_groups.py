"""Requests with several choices through the whole pipeline, whatever crashes or disconnects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.pipeline.checks import assert_quiet
from tests.pipeline.conftest import SLOW_STEP_MS, hash_driver
from tests.pipeline.killing import has_stepped, kill, num_steps
from tests.waiting import eventually
from tests.workers.execute.factories import expected_hypotheses, make_beams
from triptych import AsyncClient, Client, Driver
from triptych.driver.stream import Completion
from triptych.protocol.board import ROLES
from triptych.protocol.errors import InvalidRequest, RequestTooLong
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import expected_tokens, logprob_of, state_of

PROMPT = list(range(1, 41))


def sample(seed: int, num_tokens: int) -> list[int]:
    return expected_tokens(PROMPT, num_tokens, VOCAB_SIZE, temperature=1.0, seed=seed)


def mean_logprob(tokens: list[int]) -> float:
    contexts = [PROMPT + tokens[:index] for index in range(len(tokens))]
    logprobs = [logprob_of(state_of(c), t, VOCAB_SIZE) for c, t in zip(contexts, tokens, strict=True)]
    return sum(logprobs) / len(tokens)


def texts(completion: Completion) -> list[list[int]]:
    return [choice.token_ids for choice in completion.choices]


def test_each_choice_equals_a_single_request_with_its_seed(driver: Driver) -> None:
    answer = driver.generate(PROMPT, max_tokens=30, n=4, temperature=1.0, seed=11)
    assert texts(answer) == [sample(11 + index, 30) for index in range(4)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.token_ids == answer.choices[0].token_ids
    assert answer.usage["prompt_tokens"] == 40
    assert answer.usage["completion_tokens"] == 120
    assert_quiet(driver)


def test_choices_stream_separately_and_together(driver: Driver) -> None:
    stream = driver.submit(PROMPT, max_tokens=300, n=3, temperature=1.0, seed=2)
    together: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for delta in stream:
        together[delta.index] += delta.token_ids
    apart = [[token for delta in choice for token in delta.token_ids] for choice in stream.choices]
    assert list(together.values()) == apart == texts(stream.result()) == [sample(2 + i, 300) for i in range(3)]


@pytest.mark.parametrize("n", [1, 2])
def test_best_samples_are_the_choices(driver: Driver, n: int) -> None:
    samples = sorted((sample(5 + index, 12) for index in range(6)), key=mean_logprob, reverse=True)
    answer = driver.generate(PROMPT, max_tokens=12, n=n, best_of=6, temperature=1.0, seed=5)
    assert texts(answer) == samples[:n]
    scores = [choice.score for choice in answer.choices]
    assert scores == pytest.approx([mean_logprob(tokens) for tokens in samples[:n]])
    assert answer.logprobs is None
    assert answer.usage["candidate_tokens"] == 6 * 12
    assert_quiet(driver)


def test_candidates_are_ranked_by_the_tokens_before_a_stop(driver: Driver) -> None:
    """summarize ends them at a stop token, and only the tokens before it count."""
    ends = {index: sample(5 + index, 12)[2 + index] for index in range(4)}
    stop = sorted(set(ends.values()))

    def cut(tokens: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(tokens) if token in stop), len(tokens))
        return tokens[: end + 1]

    samples = sorted((cut(sample(5 + index, 12)) for index in range(4)), key=mean_logprob, reverse=True)
    answer = driver.generate(PROMPT, max_tokens=12, best_of=4, temperature=1.0, seed=5, stop_token_ids=stop)
    assert answer.token_ids == samples[0]
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "options", [{}, {"length_penalty": 2.0, "early_stopping": "never"}, {"early_stopping": True}], ids=str
)
def test_hypotheses_are_returned_at_the_end_best_first(driver: Driver, options: dict[str, Any]) -> None:
    beam = make_beams(0, 4, num_tokens=40, max_tokens=20, stop_ids=frozenset({0, 9, 70, 200}), **options)[0]
    beam.tokens[:40] = PROMPT
    wanted = expected_hypotheses(beam, VOCAB_SIZE)
    stream = driver.submit(PROMPT, max_tokens=20, n=3, num_beams=4, stop_token_ids=[9, 70, 200], **options)
    assert [len(delta.token_ids) for delta in stream] == [len(hypothesis.tokens) for hypothesis in wanted[:3]]
    answer = stream.result()
    assert texts(answer) == [hypothesis.tokens for hypothesis in wanted[:3]]
    assert [choice.score for choice in answer.choices] == pytest.approx([hypothesis.score for hypothesis in wanted[:3]])
    assert [choice.finish_reason for choice in answer.choices] == [hypothesis.reason for hypothesis in wanted[:3]]
    best = driver.generate(PROMPT, max_tokens=20, num_beams=4, stop_token_ids=[9, 70, 200], **options)
    assert (best.token_ids, best.choices) == (wanted[0].tokens, [best])
    assert_quiet(driver)


def test_steps_of_a_beam_search_are_not_time_to_the_first_token(slow: Driver) -> None:
    answer = slow.submit(PROMPT, max_tokens=20, n=2, num_beams=2).result(20)
    for choice in answer.choices:
        stages_ms, gaps_ms = choice.ledger["stages_ms"], choice.ledger["inter_token_ms"]
        assert stages_ms["prefill"] > 0
        assert stages_ms["decode"] > (len(choice.token_ids) - 2) * SLOW_STEP_MS  # rounding costs less than a step
        assert len(choice.token_ids) < 2 or gaps_ms["max"] > 0
    assert_quiet(slow)


def test_abort_ends_every_choice(slow: Driver) -> None:
    for options in (
        {"n": 4, "temperature": 1.0},
        {"n": 2, "best_of": 4, "temperature": 1.0},
        {"n": 2, "num_beams": 3},
    ):
        stream = slow.submit(PROMPT, max_tokens=4000, seed=1, **options)
        stream.accepted(20)
        stream.abort()
        answer = stream.result(20)
        assert len(answer.choices) == options["n"]
        assert {choice.finish_reason for choice in answer.choices} == {"abort"}
        if len(options) == 2 and "temperature" in options:
            assert all(tokens == sample(1 + i, len(tokens)) for i, tokens in enumerate(texts(answer)))
    assert_quiet(slow)


def test_single_choice_can_be_aborted(slow: Driver) -> None:
    stream = slow.submit(PROMPT, max_tokens=150, n=3, temperature=1.0, seed=1)
    stream.choices[1].abort()
    reasons = [choice.finish_reason for choice in stream.result(30).choices]
    assert reasons == ["length", "abort", "length"]
    assert_quiet(slow)


def test_no_request_overtakes_a_group_that_waits_for_its_credits() -> None:
    with hash_driver(hash_step_ms=2.0, max_num_seqs=2) as driver:  # three live sequences
        first = driver.submit([1, 2], max_tokens=60)
        first.accepted(20)
        group = driver.submit(PROMPT, max_tokens=100, n=3, temperature=1.0, seed=3)
        group.accepted(20)
        later = driver.submit([3, 4], max_tokens=1)  # waits behind the group, for longer than its own turn would take
        assert later.result(20).ledger["stages_ms"]["credit"] > group.result(20).ledger["stages_ms"]["credit"]
        assert texts(group.result()) == [sample(3 + i, 100) for i in range(3)]
        first.result(20)
        assert_quiet(driver)


def test_group_that_can_never_be_live_is_refused_with_both_numbers() -> None:
    with hash_driver(max_num_seqs=2, num_pages=12, page_size=4) as driver:
        for options in ({"n": 4}, {"best_of": 4}, {"num_beams": 4}):
            [name] = options
            with pytest.raises(InvalidRequest, match=f"{name} is 4, the limit is max_live, 3") as error:
                driver.generate([1], **options)
            assert error.value.param == name
        with pytest.raises(RequestTooLong, match="prompt has 40 tokens, which leaves 0 pages for each of 3 beams"):
            driver.generate(PROMPT, num_beams=3)
        long_id = "x" * 63
        with pytest.raises(InvalidRequest, match="request_id has 63 characters, the limit for 2 sequences is 62"):
            driver.generate([1], n=2, request_id=long_id)
        assert driver.generate([1], n=1, max_tokens=2, request_id=long_id).finish_reason == "length"


def kill_at_work(driver: Driver, role: str) -> None:
    """Kill a worker in the middle of its work, and wait until the next one works."""
    before = eventually(lambda: num_steps(driver))
    kill(driver, role)
    eventually(lambda: has_stepped(driver, before))


@pytest.mark.parametrize("options", [{"n": 3}, {"n": 2, "best_of": 4}], ids=["n", "best_of"])
def test_dead_worker_changes_no_choice(slow: Driver, options: dict[str, Any]) -> None:
    num_tokens = 500
    streams = [slow.submit(PROMPT, max_tokens=num_tokens, temperature=1.0, seed=s, **options) for s in range(4)]
    for role in ROLES:
        kill_at_work(slow, role)
    for seed, stream in enumerate(streams):
        samples = [sample(seed + index, num_tokens) for index in range(options.get("best_of", 3))]
        if "best_of" in options:
            samples.sort(key=mean_logprob, reverse=True)
        assert texts(stream.result(60)) == samples[: options["n"]]


def test_dead_worker_changes_no_hypothesis(slow: Driver) -> None:
    num_tokens = 400
    beam = make_beams(0, 3, num_tokens=40, max_tokens=num_tokens, stop_ids=frozenset({0}))[0]
    beam.tokens[:40] = PROMPT
    wanted = [hypothesis.tokens for hypothesis in expected_hypotheses(beam, VOCAB_SIZE)]
    streams = [slow.submit(PROMPT, max_tokens=num_tokens, n=3, num_beams=3) for _ in range(3)]
    for role in ROLES:
        kill_at_work(slow, role)
    assert [texts(stream.result(60)) for stream in streams] == [wanted] * 3


def test_another_client_resumes_all_choices(driver: Driver) -> None:
    with Client(driver.run_dir) as first:
        request_id = first.submit(PROMPT, max_tokens=200, n=2, temperature=1.0, seed=9).accepted(30).request_id
    with Client(driver.run_dir) as second:
        answer = second.resume(request_id, n=2).result(30)
    assert texts(answer) == [sample(9, 200), sample(10, 200)]
    assert_quiet(driver)


def test_max_tokens_zero_gives_empty_choices(driver: Driver) -> None:
    assert texts(driver.generate("hi", max_tokens=0, n=3)) == [[], [], []]
    assert texts(driver.generate("hi", max_tokens=0, n=2, best_of=4)) == [[], []]
    assert_quiet(driver)


def test_choices_in_asyncio(driver: Driver) -> None:
    async def ask() -> tuple[list[list[int]], list[list[int]]]:
        async with AsyncClient(driver.run_dir) as client:
            stream = client.submit(PROMPT, max_tokens=20, n=2, temperature=1.0, seed=4)
            apart: list[list[int]] = [[] for _ in stream.choices]
            for tokens, choice in zip(apart, stream.choices, strict=True):
                async for delta in choice:
                    tokens += delta.token_ids
            return texts(await stream.result()), apart

    whole, apart = asyncio.run(ask())
    assert whole == apart == [sample(4, 20), sample(5, 20)]


def test_expired_lease_ends_all_choices(slow: Driver) -> None:
    with Client(slow.run_dir) as client:
        client.submit(PROMPT, max_tokens=4000, n=3, lease_s=0.3).accepted(20)
    assert_quiet(slow)
