"""A model that reasons before an answer with a prescribed form: the form begins after the reasoning."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.forms.test_structured import CHAT, SCHEMA, TOOLS
from tests.launch.gateway.sse import stream
from tests.tiny import build_tiny_model, make_tiny_tokenizer, prove
from triptych import Driver
from triptych.protocol.reasoning import END, START

MESSAGES = [{"role": "user", "content": "Hello"}]
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if mode == 'open' %}<think>\n{% elif mode == 'off' %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A random model with tokens for the tags."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens([START, END])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    build_tiny_model("llama").save_pretrained(folder)
    prove(folder)
    with Driver(str(folder), device="cpu", num_pages=256, max_restarts=100) as driver:
        yield driver


@pytest.fixture(scope="module")
def reasoner(driver: Driver) -> Iterator[Site]:
    with site(driver.run_dir) as api:
        yield api


def wanted(api: Site, mode: str, end: float = 97.0) -> dict[str, Any]:
    """The reasoning is some x, fewer the larger ``end`` is."""
    biases = {START: 50.0, "x": 100.0, END: end}
    ids = api.gateway.words.encode("".join(biases), add_special_tokens=False)
    return {
        "messages": MESSAGES, "temperature": 1.0, "max_tokens": 400, "chat_template_kwargs": {"mode": mode},
        "logit_bias": {str(token_id): bias for token_id, bias in zip(ids, biases.values(), strict=True)},
    }  # fmt: skip


RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize("mode", ["open", "free"])
def test_form_begins_after_the_reasoning(reasoner: Site, mode: str) -> None:
    lengths = []
    for seed in range(4):
        asked = {**wanted(reasoner, mode), "seed": seed, "response_format": RESPONSE_FORMAT}
        reply = reasoner.ask(CHAT, **asked)
        [choice] = reply["choices"]
        thoughts = choice["message"].get("reasoning_content", "")
        assert thoughts == "x" * len(thoughts)
        assert set(json.loads(choice["message"]["content"])) == {"a", "b"}
        assert choice["finish_reason"] == "stop"
        num_tags = 1 if mode == "open" else 2
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(thoughts) + num_tags
        deltas = [c["delta"] for event in stream(reasoner.http, CHAT, **asked)[:-1] for c in event.data["choices"]]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == thoughts
        assert "".join(delta.get("content") or "" for delta in deltas) == choice["message"]["content"]
        lengths.append(len(thoughts))
    assert max(lengths) > 0, "there is no reasoning to split off"


@pytest.mark.parametrize("form", [{}, {"response_format": RESPONSE_FORMAT}], ids=["free", "form"])
@pytest.mark.parametrize("mode", ["open", "free"])
def test_budget_ends_the_reasoning(reasoner: Site, mode: str, form: dict[str, Any]) -> None:
    endless = {**wanted(reasoner, mode, end=0.0), "thinking_token_budget": 5, "seed": 1, "max_tokens": 60, **form}
    message = reasoner.ask(CHAT, **endless)["choices"][0]["message"]
    if mode == "open" or message.get("reasoning_content"):
        assert message["reasoning_content"] == "xxxxx"
    if form:
        assert set(json.loads(message["content"])) == {"a", "b"}


def test_budget_of_anthropics_messages(reasoner: Site) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "chat_template_kwargs": {"mode": "open"}}
    reply = reasoner.ask("/v1/messages", **asked, thinking={"type": "enabled", "budget_tokens": 3})
    assert 1 <= reply["usage"]["output_tokens_details"]["thinking_tokens"] <= 4
    assert reply["usage"]["output_tokens"] > 4


@pytest.mark.parametrize("more", [{"chat_template_kwargs": {"mode": "off"}}, {"separate_reasoning": False}], ids=str)
def test_form_begins_at_once_without_reasoning(reasoner: Site, more: dict[str, Any]) -> None:
    asked = {**wanted(reasoner, "free"), **more, "response_format": RESPONSE_FORMAT}
    [choice] = reasoner.ask(CHAT, **asked)["choices"]
    assert "reasoning_content" not in choice["message"]
    assert set(json.loads(choice["message"]["content"])) == {"a", "b"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=["any", "named"])
def test_forced_call_comes_after_the_reasoning(reasoner: Site, choice: Any) -> None:
    asked = {**wanted(reasoner, "free"), "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    reply = reasoner.ask(CHAT, **asked)
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 2
    [call] = reply["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"a", "b"}


def test_death_of_execute_within_the_reasoning_changes_nothing(driver: Driver, reasoner: Site) -> None:
    asked = wanted(reasoner, "open", end=95.0)
    asked["logit_bias"] = {int(token_id): bias for token_id, bias in asked["logit_bias"].items()}
    asked["structured"] = {"json_schema": SCHEMA, "after_reasoning": True}
    answers = ((seed, driver.generate(**asked, seed=seed).text) for seed in range(100))
    seed, expected = next((seed, text) for seed, text in answers if END in text and text.index(END) > 20)
    assert set(json.loads(expected.partition(END)[2])) == {"a", "b"}
    answer = driver.submit(**asked, seed=seed)
    text = next(iter(answer)).text
    pid = driver.pids["execute"]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert text + "".join(delta.text for delta in answer) == expected
