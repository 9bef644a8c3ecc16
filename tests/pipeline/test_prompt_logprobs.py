"""Logprobs of a prompt through the whole pipeline, for any chunks and after crashes."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest

from tests.pipeline.checks import assert_quiet
from tests.waiting import eventually
from triptych import Client, Driver
from triptych.driver.stream import Completion
from triptych.protocol.errors import InvalidRequest
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import expected_tokens, logprob_of, state_of

PROMPT = [(7 * i) % 250 + 1 for i in range(100)]


def logprobs(prompt: Sequence[int]) -> list[float]:
    """The logprobs of all tokens but the first, from the hash model's definition."""
    return [logprob_of(state_of(prompt[:i]), prompt[i], VOCAB_SIZE) for i in range(1, len(prompt))]


def assert_scored(answer: Completion, prompt: Sequence[int] = PROMPT, *, num_alternatives: int = 0) -> None:
    scores = answer.prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    assert [score.logprob for score in scores[1:] if score] == pytest.approx(logprobs(prompt))
    assert all(len(score.alternatives) == num_alternatives for score in scores[1:] if score)


def test_prompt_is_scored_beside_other_requests(driver: Driver) -> None:
    mates = [driver.submit(PROMPT[: 10 + i], max_tokens=50) for i in range(5)]
    answer = driver.generate(PROMPT, max_tokens=5, prompt_logprobs=3)
    assert_scored(answer, num_alternatives=3)
    assert answer.token_ids == expected_tokens(PROMPT, 5, VOCAB_SIZE)
    assert all(mate.result(30).prompt_logprobs is None for mate in mates)
    assert_quiet(driver)


def test_alternative_is_the_likeliest_token_and_rank_counts_the_likelier_ones(driver: Driver) -> None:
    for score in driver.generate(PROMPT, max_tokens=1, prompt_logprobs=2).prompt_logprobs or []:
        if score is not None:
            best = score.alternatives[0][1]
            assert score.rank == pytest.approx(score.logprob / best)


@pytest.mark.parametrize("prompt", [PROMPT, [5], [5, 6]], ids=["long", "one", "two"])
def test_prompt_is_scored_without_an_answer(driver: Driver, prompt: list[int]) -> None:
    answer = driver.generate(prompt, max_tokens=0, prompt_logprobs=1)
    assert_scored(answer, prompt, num_alternatives=1)
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([], "", "length")
    assert answer.usage["completion_tokens"] == 0
    assert_quiet(driver)


def test_cached_prompt_is_computed_again_to_be_scored(driver: Driver) -> None:
    driver.generate(PROMPT, max_tokens=5)
    answer = driver.generate(PROMPT, max_tokens=5, prompt_logprobs=0)
    assert_scored(answer)
    assert answer.usage["cached_tokens"] == 0
    assert driver.generate(PROMPT, max_tokens=5).usage["cached_tokens"] > 80, "its pages can be shared"


@pytest.mark.parametrize("options", [{"n": 3}, {"n": 2, "best_of": 4}, {"n": 2, "max_tokens": 0}], ids=str)
def test_first_of_several_choices_has_the_scores(driver: Driver, options: dict[str, int]) -> None:
    wanted = {"max_tokens": 8, "temperature": 1.0, "seed": 3, "prompt_logprobs": 1, **options}
    answer = driver.generate(PROMPT, **wanted)
    assert_scored(answer, num_alternatives=1)
    assert all(choice.prompt_logprobs is None for choice in answer.choices[1:])
    assert_quiet(driver)


@pytest.mark.parametrize("role", ["prepare", "execute", "summarize"])
@pytest.mark.parametrize("max_tokens", [0, 40])
def test_scores_survive_a_crash_of_any_worker(slow_prefill: Driver, role: str, max_tokens: int) -> None:
    before = slow_prefill.stats()["execute"]["prefill_tokens"]
    stream = slow_prefill.submit(PROMPT, max_tokens=max_tokens, prompt_logprobs=2)
    stream.accepted(30)
    eventually(lambda: slow_prefill.stats()["execute"]["prefill_tokens"] > before + 8 or stream.done)
    pid = slow_prefill.pids[role]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    answer = stream.result(60)
    assert_scored(answer, num_alternatives=2)
    assert answer.token_ids == expected_tokens(PROMPT, max_tokens, VOCAB_SIZE)
    eventually(lambda: slow_prefill.pids[role] not in (None, pid) and slow_prefill.health().status == "ok", timeout=30)


def test_another_client_gets_them_with_the_end(slow_prefill: Driver) -> None:
    prompt = PROMPT * 5  # half a second, so that the first client has left before the end
    with Client(slow_prefill.run_dir) as first:
        request_id = first.submit(prompt, max_tokens=3, prompt_logprobs=1).accepted(30).request_id
    with Client(slow_prefill.run_dir) as second:
        assert_scored(second.resume(request_id).result(30), prompt, num_alternatives=1)
    assert_quiet(slow_prefill)


def test_abort_before_the_end_of_the_prompt_gives_no_scores(slow_prefill: Driver) -> None:
    stream = slow_prefill.submit(PROMPT * 20, max_tokens=3, prompt_logprobs=1)
    stream.accepted(30)
    stream.abort()
    assert stream.result(30).prompt_logprobs is None


def test_request_that_cannot_be_scored_is_refused(driver: Driver) -> None:
    for options in ({"prompt_logprobs": 21}, {"prompt_logprobs": 1, "num_beams": 2}):
        with pytest.raises(InvalidRequest) as caught:
            driver.generate(PROMPT, **options)
        assert caught.value.param == "prompt_logprobs"
