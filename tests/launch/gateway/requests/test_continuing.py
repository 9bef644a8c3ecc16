"""An assistant turn begun by the client and continued by the model, on every route that accepts chats."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch.gateway.conftest import Site
from tests.launch.gateway.scripted import Dictation
from tests.launch.gateway.sse import events, stream
from tests.launch.gateway.test_resumed_chats import joined_deltas

CHAT, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/completions"
QUESTION = {"role": "user", "content": "hi"}
PROMPT = "user: hi\nassistant: So"  # from the hash model's template
TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


def begun(text: str = "So", **more: Any) -> dict[str, Any]:
    return {"messages": [QUESTION, {"role": "assistant", "content": text, **more}], "max_tokens": 20, "temperature": 0}


def continued(text: str = "So", **more: Any) -> dict[str, Any]:
    return {**begun(text), "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 100, **more}


def test_every_route_continues_at_the_end_of_the_turn(api: Site) -> None:
    expected = api.ask(COMPLETIONS, prompt=PROMPT, max_tokens=20, temperature=0)["choices"][0]["text"]
    reply = api.ask(CHAT, **begun(), continue_final_message=True)
    assert reply["choices"][0]["message"]["content"] == expected
    assert "".join(block["text"] for block in api.ask(MESSAGES, **begun())["content"]) == expected
    ids = api.ask("/tokenize", messages=begun()["messages"], continue_final_message=True)["tokens"]
    assert api.ask("/detokenize", tokens=ids)["prompt"] == PROMPT
    count = api.ask(f"{MESSAGES}/count_tokens", messages=begun()["messages"])["input_tokens"]
    assert count == len(ids) == reply["usage"]["prompt_tokens"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("first", "text", "thoughts", "content"),
    [
        ("So", " it\nis.", "", " it\nis."),
        ("So", "<think>a</think>b", "", "<think>a</think>b"),
        ("<think>a</think>\nSo", "\n<think>", "", "\n<think>"),
        ("<think>\nLet", " me.\n</think>\n\nYes.", " me.", "Yes."),
        ("<think>\n", "<think>\nLet me.</think>Yes.", "Let me.", "Yes."),
        ("", "<think>Let me.</think>Yes.", "Let me.", "Yes."),
    ],
)
def test_answer_is_what_the_model_adds(
    thinking: Site, monkeypatch: pytest.MonkeyPatch, first: str, text: str, thoughts: str, content: str, n: int
) -> None:
    script = Dictation(thinking, monkeypatch, text)
    asked = continued(first, n=n, resumable=True)
    reply = thinking.ask(CHAT, **asked)
    found = stream(thinking.http, CHAT, **asked)
    path = f"/v1/requests/{found[0].data['id']}"
    with thinking.http.stream("GET", path) as again:
        resumed = list(events(again))
    for index in range(n):
        message = reply["choices"][index]["message"]
        assert (message.get("reasoning", ""), message["content"]) == (thoughts, content)
        for received in (found, resumed):
            assert (joined_deltas(received, index)["reasoning"], joined_deltas(received, index)["content"]) == (
                thoughts,
                content,
            )
    assert [each["max_tokens"] for each in script.asked] == [
        100,
        100,
    ]  # the prompt's end is not looked up
    for request_id in (reply["id"], found[0].data["id"]):
        assert thinking.http.delete(f"/v1/requests/{request_id}").status_code == 200


@pytest.mark.parametrize(
    ("first", "text", "thoughts", "content"),
    [
        ("So", " it is.", "", "So it is."),
        ("<think>\nLet ", "me.\n</think>Yes.", "Let me.", "Yes."),
    ],
)
def test_echo_returns_the_turn_from_its_beginning(
    thinking: Site, monkeypatch: pytest.MonkeyPatch, first: str, text: str, thoughts: str, content: str
) -> None:
    Dictation(thinking, monkeypatch, text)
    asked = continued(first, echo=True)
    message = thinking.ask(CHAT, **asked)["choices"][0]["message"]
    assert (message.get("reasoning", ""), message["content"]) == (thoughts, content)
    received = joined_deltas(stream(thinking.http, CHAT, **asked))
    assert (received["reasoning"], received["content"]) == (thoughts, content)


def test_added_text_may_be_a_call_or_follow_a_schema(thinking: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    form = {"choice": ["yes", "no"]}
    reply = thinking.ask(CHAT, **continued('{"a": "', structured_outputs=form))
    assert reply["choices"][0]["message"]["content"] in form["choice"]
    Dictation(thinking, monkeypatch, f" look. {CALL}")
    [choice] = thinking.ask(CHAT, **continued("I", tools=TOOLS))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("look.", "tool_calls")


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, continued(add_generation_prompt=True), "add_generation_prompt"),
    (CHAT, {**begun(), "add_generation_prompt": False}, "add_generation_prompt"),
    (CHAT, {**begun(), "echo": True}, "echo"),
    (CHAT, continued(messages=[QUESTION]), "continue_final_message"),
    (CHAT, continued(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]),
     "continue_final_message"),
    ("/tokenize", {"messages": begun()["messages"], "add_generation_prompt": False}, "add_generation_prompt"),
    ("/tokenize", {"messages": [QUESTION], "continue_final_message": True}, "continue_final_message"),
    ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
    (MESSAGES, begun("So "), "messages[1]"),
    (MESSAGES, begun([{"type": "tool_use", "id": "a", "name": "f"}]), "messages[1]"),  # type: ignore[arg-type]
    (MESSAGES, begun([{"type": "thinking", "thinking": "so"}]), "messages[1]"),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize(("path", "wrong", "param"), WRONG, ids=range(len(WRONG)))
def test_turn_that_cannot_be_continued_is_a_400_with_the_reason(
    api: Site, path: str, wrong: dict[str, Any], param: str
) -> None:
    status, error = api.refusal(path, **wrong)
    assert (status, error["param"]) == (400, param), error
