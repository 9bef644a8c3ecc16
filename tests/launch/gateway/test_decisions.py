"""/v1/decisions, compared with the probabilities given by the model itself."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.test_edge import head_of, raw
from tests.waiting import eventually
from triptych import Driver
from triptych.driver.async_client import AsyncClient
from triptych.driver.async_stream import AsyncStream

PATH = "/v1/decisions"
STATE = "len returns the number of items in a container. " * 8


def logprob_by_completions(api: Site, prompt: str, option: str) -> float:
    """The sum over an option's tokens, each forced by a bias: the slow way, through another route."""
    words = api.gateway.words
    ids, total = words.encode(prompt, add_special_tokens=False), 0.0
    for token_id in words.encode(option, add_special_tokens=False):
        wanted = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 0, "logit_bias": {str(token_id): 100}}
        [choice] = api.ask("/v1/completions", **wanted)["choices"]
        total += choice["logprobs"]["token_logprobs"][0]
        ids = [*ids, token_id]
    return total


def test_options_have_the_probabilities_of_their_tokens(demo: Site) -> None:
    options = ["items", "item", "numbers of things"]
    question = {"question": "What does it count?", "options": options}
    [answer] = demo.ask(PATH, state=STATE, questions=[question])["answers"]
    text = f"{STATE}\n\nWhat does it count?\nAnswer with one of:\n- items\n- item\n- numbers of things"
    prompt = f"<|user|>{text}<|end|><|assistant|>"
    logprobs = [logprob_by_completions(demo, prompt, option) for option in options]
    assert [row["logprob"] for row in answer["probabilities"]] == pytest.approx(logprobs, abs=0.05)
    total = sum(math.exp(value - max(logprobs)) for value in logprobs)
    shares = [math.exp(value - max(logprobs)) / total for value in logprobs]
    assert [row["probability"] for row in answer["probabilities"]] == pytest.approx(shares, rel=0.1, abs=1e-6)
    assert answer["choice"] == options[shares.index(max(shares))]


def test_state_is_computed_once(demo: Site) -> None:
    questions = [{"question": f"Question number {i}?", "options": ["yes", "no"]} for i in range(6)]
    usage = demo.ask(PATH, state=STATE + "once", questions=questions)["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] > 0.6 * usage["input_tokens"]


def test_each_question_type_has_its_answer(demo: Site) -> None:
    questions = [
        {"type": "predicate", "name": "p", "instructions": "Is it long?"},
        {"type": "choice", "instructions": "Which?", "choices": [{"value": "a", "description": "1"}, {"value": False}]},
        {"type": "score", "instructions": "How good?", "levels": [{"label": x} for x in ("bad", "fair", "good")]},
    ]
    reply = demo.ask(PATH, input=[{"role": "user", "content": STATE}], questions=questions)
    predicate, choice, score = reply["answers"]
    assert predicate["name"] == "p"
    assert 0 <= predicate["probability"] <= 1
    assert choice["choice"] in ("a", False)
    assert sum(row["probability"] for row in choice["probabilities"]) == pytest.approx(1)
    assert 0 <= score["score"] <= 2
    assert [row["label"] for row in score["probabilities"]] == ["bad", "fair", "good"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"questions": [{"question": "?", "options": ["a", "b"]}]}, "state"),
        ({"state": "s", "input": "s", "questions": [{"question": "?", "options": ["a", "b"]}]}, "state"),
        ({"state": "s", "questions": []}, "questions"),
        ({"state": "s", "questions": [{"options": ["a", "b"]}]}, "questions[0].instructions"),
        ({"state": "s", "questions": [{"question": "?", "options": ["a", "a"]}]}, "questions[0].choices"),
        (
            {"state": "s", "questions": [{"question": "?", "choices": [{"value": True}, {"value": "true"}]}]},
            "questions[0].choices",
        ),
        ({"state": "s", "questions": [{"question": "?", "options": ["a"]}]}, "questions[0].options"),
        ({"state": "s", "questions": [{"type": "score", "question": "?"}]}, "questions[0].levels"),
        ({"state": "s", "questions": [{"question": "?", "options": ["a", "b"], "x": 1}]}, "questions[0].x"),
    ],
)
def test_invalid_question_is_refused(demo: Site, body: dict[str, object], param: str) -> None:
    status, error = demo.refusal(PATH, **body)
    assert (status, error["param"]) == (400, param)


def test_model_that_cannot_score_options_is_told_from_a_failure(api: Site) -> None:
    """The hash model never chooses another token than its own. Clients send a request again after a 500."""
    status, error = api.refusal(PATH, state="s", questions=[{"question": "?", "options": ["a", "b"]}])
    assert (status, error["code"], error["param"]) == (400, "unsupported_value", "questions")
    assert "this model cannot score options" in error["message"]


def test_decision_is_aborted_when_its_connection_closes() -> None:
    with Driver("hash-lm", hash_step_ms=3000, lease_s=60) as slow, site(slow.run_dir) as api:
        question = {"question": "?", "options": ["a", "b"]}
        body = json.dumps({"state": "s", "questions": [question]}).encode()
        with raw(api) as connection:
            connection.sendall(head_of(len(body), PATH) + body)
            eventually(lambda: slow.stats()["summarize"]["live"])
        eventually(lambda: api.gateway.counters.num_open == 0)
        eventually(lambda: slow.stats()["summarize"]["live"] == 0)
        assert slow.stats()["summarize"]["finished"]["abort"] == 1


def test_failed_question_aborts_the_others(demo: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client, streams, loops = demo.gateway.client, list[AsyncStream](), set[asyncio.AbstractEventLoop]()

    def submit(**options: object) -> AsyncStream:
        loops.add(asyncio.get_running_loop())
        streams.append(AsyncClient.submit(client, **options))  # type: ignore[arg-type]
        return streams[-1]

    def score_on() -> bool:
        return any("score" in repr(task.get_coro()) for loop in loops for task in asyncio.all_tasks(loop))

    monkeypatch.setattr(client, "submit", submit)
    questions = [{"question": f"{number}?", "options": ["a", "b"]} for number in range(400)]
    questions[1]["options"] = ["a", "b " * 100]
    status, error = demo.refusal(PATH, state="s", questions=questions)
    assert (status, error["param"]) == (400, "questions")
    eventually(lambda: not score_on())
    assert len(streams) < 200
