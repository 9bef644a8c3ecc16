"""The reasoning effort reaches the chat template from each API's field for it, if the template uses such a variable."""

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
    """A script whose template has the variable for the effort."""
    know(api, monkeypatch, EFFORT)
    return api


def know(api: Site, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the gateway believe that the chat template contains this, too."""
    facts = api.gateway.facts
    monkeypatch.setitem(api.gateway.__dict__, "facts", replace(facts, chat_template=f"{facts.chat_template}{text}"))


@pytest.mark.parametrize("route", SAID)
def test_template_with_the_variable_gets_the_effort(knowing: Site, script: Dictation, route: str) -> None:
    reply = knowing.ask(route, **SAID[route]("low"))
    assert script.asked[-1]["chat_template_kwargs"] == {"reasoning_effort": "low"}
    assert reply.get("reasoning", {"effort": "low"})["effort"] == "low"  # the response repeats it


@pytest.mark.parametrize(
    "switch", ["{% if enable_thinking %}", "{% if not thinking is defined %}", "{{ 'a' if add and thinking else 'b' }}"]
)
@pytest.mark.parametrize("route", PARAMS)
def test_any_effort_switches_reasoning_on_if_that_is_all_that_the_template_can_do(
    api: Site, script: Dictation, monkeypatch: pytest.MonkeyPatch, route: str, switch: str
) -> None:
    """As of Qwen 3. Agents send the effort that their user has once chosen, whatever the model."""
    know(api, monkeypatch, switch)
    api.ask(route, **SAID[route]("low"))
    assert script.asked[-1]["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}


@pytest.mark.parametrize("text", ["", "{{ message.thinking }}", "Show your thinking."])
@pytest.mark.parametrize("route", PARAMS)
def test_effort_is_refused_if_the_template_has_no_variable(
    api: Site, monkeypatch: pytest.MonkeyPatch, route: str, text: str
) -> None:
    know(api, monkeypatch, text)
    status, error = api.refusal(route, **SAID[route]("low"))
    assert (status, error["code"], error["param"]) == (400, "unsupported_value", PARAMS[route])
    assert "'low', but this model's chat template has no" in error["message"]


def test_messages_ignores_an_effort_that_the_template_does_not_use(api: Site, script: Dictation) -> None:
    api.ask(MESSAGES, **SAID[MESSAGES]("low"))
    assert "chat_template_kwargs" not in script.asked[-1]


@pytest.mark.parametrize("route", PARAMS)
def test_effort_none_sets_the_template_s_thinking_switch(api: Site, script: Dictation, route: str) -> None:
    api.ask(route, **SAID[route]("none"))
    assert script.asked[-1]["chat_template_kwargs"] == OFF


def test_effort_none_may_be_a_level_too(knowing: Site, script: Dictation) -> None:
    knowing.ask(CHAT, **SAID[CHAT]("none"))
    assert script.asked[-1]["chat_template_kwargs"] == {**OFF, "reasoning_effort": "none"}


def test_explicit_template_variable_wins(knowing: Site, script: Dictation) -> None:
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
def test_invalid_effort_is_refused_with_its_name(knowing: Site, route: str, body: dict[str, Any], param: str) -> None:
    status, error = knowing.refusal(route, **body)
    assert (status, error["param"]) == (400, param)
