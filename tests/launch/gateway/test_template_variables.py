"""How much is to be thought reaches the chat template from the field that each API has for it, if it knows the word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.launch.gateway.conftest import Site
from tests.launch.gateway.scripted import Dictation

EFFORT = "Reasoning: {{ reasoning_effort }}"  # as in the template of gpt-oss
USER = [{"role": "user", "content": "hi"}]
OFF = {"enable_thinking": False, "thinking": False}
CHAT, RESPONSES, MESSAGES, TOKENIZE = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"
SAID: dict[str, Any] = {
    CHAT: lambda level: {"messages": USER, "reasoning_effort": level},
    RESPONSES: lambda level: {"input": "hi", "reasoning": {"effort": level, "summary": "auto"}},
    MESSAGES: lambda level: {"messages": USER, "max_tokens": 5, "output_config": {"effort": level}},
    TOKENIZE: lambda level: {"messages": USER, "reasoning_effort": level},
}
PARAMS = {CHAT: "reasoning_effort", RESPONSES: "reasoning.effort", TOKENIZE: "reasoning_effort"}


@pytest.fixture
def script(api: Site, monkeypatch: pytest.MonkeyPatch) -> Dictation:
    return Dictation(api, monkeypatch, "Yes.")


@pytest.fixture
def knowing(api: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Whose template knows of efforts."""
    gateway = api.gateway
    template = f"{gateway.facts.chat_template}{{# {EFFORT} #}}"
    monkeypatch.setitem(gateway.__dict__, "facts", replace(gateway.facts, chat_template=template))
    return api


@pytest.mark.parametrize("route", SAID)
def test_a_template_that_knows_it_gets_it(knowing: Site, script: Dictation, route: str) -> None:
    reply = knowing.ask(route, **SAID[route]("low"))
    assert script.asked[-1]["chat_template_kwargs"] == {"reasoning_effort": "low"}
    assert reply.get("reasoning", {"effort": "low"})["effort"] == "low"  # a response says it again


@pytest.mark.parametrize("route", PARAMS)
def test_it_is_refused_where_the_template_does_not(api: Site, route: str) -> None:
    status, error = api.refusal(route, **SAID[route]("low"))
    assert (status, error["code"], error["param"]) == (400, "unsupported_value", PARAMS[route])
    assert "'low', but this model's chat template has no" in error["message"]


def test_who_always_says_it_is_not_refused_by_messages(api: Site, script: Dictation) -> None:
    api.ask(MESSAGES, **SAID[MESSAGES]("low"))
    assert "chat_template_kwargs" not in script.asked[-1]


@pytest.mark.parametrize("route", PARAMS)
def test_no_thoughts_are_the_switch_that_templates_have(api: Site, script: Dictation, route: str) -> None:
    api.ask(route, **SAID[route]("none"))
    assert script.asked[-1]["chat_template_kwargs"] == OFF


def test_no_thoughts_may_be_a_level_too(knowing: Site, script: Dictation) -> None:
    knowing.ask(CHAT, **SAID[CHAT]("none"))
    assert script.asked[-1]["chat_template_kwargs"] == {**OFF, "reasoning_effort": "none"}


def test_what_is_said_of_a_variable_itself_counts(knowing: Site, script: Dictation) -> None:
    variables = {"reasoning_effort": "very high", "tone": "kind"}
    knowing.ask(CHAT, **SAID[CHAT]("low"), chat_template_kwargs=variables)
    assert script.asked[-1]["chat_template_kwargs"] == variables


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (CHAT, {"messages": USER, "reasoning_effort": "much"}, "reasoning_effort"),
        (RESPONSES, {"input": "hi", "reasoning": {"effort": 5}}, "reasoning.effort"),
        (RESPONSES, {"input": "hi", "reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        (TOKENIZE, {"prompt": "hi", "reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_what_it_cannot_be_is_named(knowing: Site, route: str, body: dict[str, Any], param: str) -> None:
    status, error = knowing.refusal(route, **body)
    assert (status, error["param"]) == (400, param)
