"""Reasoning: where it ends however the text is cut, and where it appears in a reply."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.launch.gateway.conftest import Site
from tests.launch.gateway.openai_types import check
from tests.launch.gateway.scripted import Dictation
from tests.launch.gateway.sse import Event, stream, text_of
from triptych.launch.gateway.config import GatewayConfig
from triptych.launch.gateway.openai.packed_reasoning import unpacked
from triptych.launch.gateway.reasoning.handling import Reasoning
from triptych.launch.gateway.reasoning.thoughts import ThoughtReader, find_reasoning_parser
from triptych.launch.gateway.requests.ids import new_id, read_id

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
TEXT = "<think>\nLet me see. \n</think>\n\nIt is <b>."
CASES = {
    "tags": (False, TEXT, "Let me see.", "It is <b>."),
    "white space first": (False, "\n " + TEXT, "Let me see.", "It is <b>."),
    "opened in the prompt": (True, "\nLet </thin me\n</think>\n\nsee", "Let </thin me", "see"),
    "opened twice": (True, "<think>\nLet me\n</think>see", "Let me", "see"),
    "no thoughts": (False, " It <think>is</think>", "", " It <think>is</think>"),
    "half a tag": (False, "<thin", "", "<thin"),
    "empty": (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    "cut within them": (False, "<think>Let me \n</thi", "Let me \n</thi", ""),
    "opened and cut": (True, "Let me ", "Let me", ""),
    "a second time": (False, "<think>a</think>b</think><think>", "a", "b</think><think>"),
    "nothing": (False, "", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 10_000], ids=["characters", "threes", "whole"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reasoning_is_split_from_the_answer_however_the_text_is_cut(
    case: tuple[bool, str, str, str], size: int
) -> None:
    is_open, text, *expected = case
    reader = ThoughtReader(is_open=is_open)
    found = [reader.push(text[start : start + size]) for start in range(0, len(text), size)]
    thoughts, answers = zip(*found, reader.flush(), strict=True)
    assert ["".join(thoughts), "".join(answers)] == expected


TAG = "<tool_call>"
WITH_CALLS = [  # parser, reasoning, and the rest
    ("hermes", "Let me see.", f"\n\n{CALL}\n"),
    ("hermes", f"{CALL}?", "</think>so"),
    ("hermes", f"{CALL}? Yes.", f"\n{CALL}\n{CALL}"),
    ("hermes", f"{CALL} it is.", ""),
    ("hermes", f"So {TAG}{{", ""),
    ("qwen3_coder", f"Not {TAG}<function>, but", f"{TAG}\n<function=f>\n</function>\n</tool_call>"),
    ("glm45", f"Not {TAG}for this {TAG}f<b>, but", f" {TAG}f\n<arg_key>a</arg_key><arg_value></arg_value></tool_call>"),
    ("glm45", "", f"{TAG}f</tool_call>"),
    ("mistral", f"So {CALL}", ""),
]


@pytest.mark.parametrize("size", [1, 3, 10_000], ids=["characters", "threes", "whole"])
@pytest.mark.parametrize(("parser", "thoughts", "rest"), WITH_CALLS)
def test_reasoning_without_an_end_tag_may_end_with_calls(parser: str, thoughts: str, rest: str, size: int) -> None:
    """Qwen 3.5 may leave out the tag in front of them, and they were lost in the reasoning."""
    reader, text = Reasoning(is_split=True, is_open=True).before(parser).reader(), thoughts + rest
    assert reader is not None
    found = [reader.push(text[start : start + size]) for start in range(0, len(text), size)]
    told, answers = zip(*found, reader.flush(), strict=True)
    assert ["".join(told), "".join(answers)] == [thoughts, rest.lstrip().removeprefix("</think>")]


def test_call_without_the_end_of_the_reasoning_is_made(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    Dictation(api, monkeypatch, f"Let me see.\n{CALL}", is_open=True)
    reply = api.ask(CHAT, messages=MESSAGES, tools=TOOLS)
    [choice] = reply["choices"]
    assert (choice["finish_reason"], choice["message"]["reasoning"]) == ("tool_calls", "Let me see.")
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["time"]
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Let me see.\n")


def test_only_a_possible_tag_is_held_back() -> None:
    reader = ThoughtReader(is_open=True)
    assert [reader.push(text)[0] for text in ("So", " </th", "en", " and", "</think")] == [
        "So",
        "",
        " </then",
        " and",
        "",
    ]
    assert reader.push(">x") == ("", "x")
    assert reader.push("</think>") == ("", "</think>")


def test_mention_of_a_tag_of_calls_is_not_held_back() -> None:
    reader = Reasoning(is_split=True, is_open=True).before("hermes").reader()
    assert reader is not None
    pieces = (f"So {TAG} is", f" a tag {TAG}", "{", '"name"')
    assert [reader.push(text) for text in pieces] == [(f"So {TAG} is", ""), (" a tag", ""), ("", ""), ("", "")]


def test_reasoning_is_detected_from_the_template() -> None:
    assert find_reasoning_parser("auto", "{{ m.content.split('</think>')[-1] }}") == "think"
    assert find_reasoning_parser("auto", "{{ messages }}") == "none"
    assert find_reasoning_parser("none", "</think>") == "none"
    assert find_reasoning_parser(GatewayConfig(reasoning_parser="qwen3").reasoning_parser, "") == "think"


@pytest.fixture
def api(thinking: Site) -> Site:
    return thinking


def reasoning_of(found: list[Event], index: int = 0) -> str:
    choices = [c for e in found if e.data != "[DONE]" for c in e.data["choices"] if c["index"] == index]
    deltas = [choice["delta"] for choice in choices]
    assert [delta.get("reasoning") for delta in deltas] == [delta.get("reasoning_content") for delta in deltas]
    return "".join(delta.get("reasoning") or "" for delta in deltas)


@pytest.mark.parametrize(
    ("is_open", "text"), [(False, TEXT), (True, TEXT.removeprefix("<think>"))], ids=["said", "in the prompt"]
)
def test_reasoning_has_its_own_field(api: Site, monkeypatch: pytest.MonkeyPatch, is_open: bool, text: str) -> None:
    Dictation(api, monkeypatch, text, is_open=is_open)
    reply = api.ask(CHAT, messages=MESSAGES)
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "It is <b>.")
    assert message["reasoning"] == message["reasoning_content"]
    details = reply["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == text.index("</think>") + len("</think>")  # a token is a byte
    check("chat.ChatCompletion", reply)


@pytest.mark.parametrize("n", [1, 2])
def test_reasoning_is_streamed(api: Site, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    Dictation(api, monkeypatch, TEXT)
    found = stream(api.http, CHAT, messages=MESSAGES, n=n, stream_options={"include_usage": True})
    for index in range(n):
        assert (reasoning_of(found, index), text_of(found, index)) == ("Let me see.", "It is <b>.")
    assert found[-2].data["usage"]["completion_tokens_details"]["reasoning_tokens"] == 29 * n
    for event in found[:-1]:
        check("chat.ChatCompletionChunk", event.data)


@pytest.mark.parametrize(
    ("asked", "thoughts", "content"),
    [
        ({"separate_reasoning": False}, None, TEXT),
        ({"include_reasoning": False}, None, "It is <b>."),
        ({"max_tokens": 12}, "Let", ""),
    ],
)
def test_request_decides_where_reasoning_appears(
    api: Site, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], thoughts: str | None, content: str
) -> None:
    Dictation(api, monkeypatch, TEXT)
    reply = api.ask(CHAT, messages=MESSAGES, **asked)
    message = reply["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thoughts, content)
    num_reasoning = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert (num_reasoning > 0) == ("separate_reasoning" not in asked)


def test_calls_come_after_the_reasoning(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    Dictation(api, monkeypatch, f"<think>{CALL}?</think>\n\n{CALL}")
    [choice] = api.ask(CHAT, messages=MESSAGES, tools=TOOLS)["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (f"{CALL}?", None)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["time"]
    found = stream(api.http, CHAT, messages=MESSAGES, tools=TOOLS)
    assert (reasoning_of(found), text_of(found)) == (f"{CALL}?", "")
    assert found[-2].data["choices"][0]["finish_reason"] == "tool_calls"


def test_structured_answer_has_no_reasoning(api: Site) -> None:
    form = {"choice": ["<think>a</think>b"]}
    [choice] = api.ask(CHAT, messages=MESSAGES, structured_outputs=form)["choices"]
    assert choice["message"]["content"] == "<think>a</think>b"


@pytest.mark.parametrize("more", [{}, {"resumable": True, "tools": TOOLS}])
def test_logprobs_cover_the_content_tokens(api: Site, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    asked = {"messages": MESSAGES, "logprobs": True, "return_token_ids": True, **more}
    Dictation(api, monkeypatch, text := f"{TEXT} <tool")
    whole = api.ask(CHAT, **asked)
    entries = whole["choices"][0]["logprobs"]["content"]
    content = text.partition("</think>")[2].lstrip()
    assert "".join(entry["token"] for entry in entries[: len(content)]) == content
    found = stream(api.http, CHAT, **asked)
    choices = [event.data["choices"][0] for event in found[1:-1]]
    assert [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())] == entries
    token_ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
    assert token_ids == whole["choices"][0]["token_ids"]
    for request_id in (whole["id"], found[0].data["id"]) if more else ():
        assert api.http.delete(f"/v1/requests/{request_id}").status_code == 200


def test_reasoning_left_in_the_content_has_logprobs(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    Dictation(api, monkeypatch, TEXT)
    [choice] = api.ask(CHAT, messages=MESSAGES, logprobs=True, separate_reasoning=False)["choices"]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]).startswith(TEXT)


@pytest.mark.parametrize("is_open", [False, True])
def test_resumed_stream_has_the_rest_of_reasoning_and_content(
    api: Site, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    text = TEXT.removeprefix("<think>" if is_open else "")
    Dictation(api, monkeypatch, text, is_open=is_open)
    found = stream(api.http, CHAT, messages=MESSAGES, resumable=True)
    path = f"/v1/requests/{found[0].data['id']}"
    for num_tokens in range(0, len(text) + 1, 3):
        reply = api.http.get(path, params={"offset": num_tokens})
        rest = [Event(json.loads(line[6:]), None, None) for line in reply.text.splitlines() if line[:7] == "data: {"]
        thoughts, answer = ThoughtReader(is_open=is_open).push(text[:num_tokens])
        assert (thoughts + reasoning_of(rest), answer + text_of(rest)) == ("Let me see.", "It is <b>.")
        details = rest[-1].data["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": text.index("</think>") + len("</think>")}
    whole = api.http.get(path, params={"stream": False}).json()["choices"][0]["message"]
    assert (whole["reasoning"], whole["content"]) == ("Let me see.", "It is <b>.")
    assert api.http.delete(path).status_code == 200


@pytest.mark.parametrize(
    "reasoning", [Reasoning(a, b, c) for a in (True, False) for b in (a, False) for c in (a, True)]
)
def test_request_id_records_where_reasoning_appears(reasoning: Reasoning) -> None:
    read = read_id(new_id("chatcmpl.hermes", "job", num_choices=64, thoughts=reasoning.mark))
    assert (read.kind, read.parser, read.num_choices) == ("chatcmpl", "hermes", 64)
    assert Reasoning.of_mark(read.thoughts).mark == reasoning.mark


def test_reasoning_is_an_item_of_a_response(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Dictation(api, monkeypatch, TEXT)
    reply = api.ask(RESPONSES, input="hi", top_logprobs=0)
    check("responses.Response", reply)
    thought, message = reply["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "Let me see.")
    logprobs = message["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs).startswith("It is <b>.")
    assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": 29}
    api.ask(RESPONSES, input=[{"role": "user", "content": "a"}, *reply["output"], {"role": "user", "content": "b"}])
    assert script.asked[-1]["messages"][1] == {
        "role": "assistant", "content": "It is <b>.", "reasoning_content": "Let me see.",
    }  # fmt: skip


def test_reasoning_item_is_streamed_first(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    Dictation(api, monkeypatch, f"<think>Well.</think>{CALL}")
    tools = [{"type": "function", "name": "time", "parameters": {"type": "object"}}]
    found = stream(api.http, RESPONSES, input="hi", tools=tools, top_logprobs=0)
    assert "".join(e.data["delta"] for e in found if e.name == "response.reasoning_text.delta") == "Well."
    output = found[-1].data["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "function_call"]
    done = [event.data["item"] for event in found if event.name == "response.output_item.done"]
    assert done == output


def test_reasoning_can_be_sent_back_by_a_client_that_keeps_nothing_else_of_it(
    api: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vercel's AI SDK and Microsoft's Agent Framework do not send back its text."""
    script = Dictation(api, monkeypatch, "<think>Schön 😀.</think>Yes.")
    asked: dict[str, Any] = {"input": "hi", "include": ["reasoning.encrypted_content"]}
    thought, answer = api.ask(RESPONSES, **asked)["output"]
    *_, last = stream(api.http, RESPONSES, **asked)
    assert last.data["response"]["output"][0]["encrypted_content"] == thought["encrypted_content"]
    kept = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    api.ask(RESPONSES, input=[{"role": "user", "content": "a"}, kept, answer, {"role": "user", "content": "b"}])
    assert script.asked[-1]["messages"][1]["reasoning_content"] == "Schön 😀."
    assert api.ask(RESPONSES, input="hi")["output"][0]["encrypted_content"] is None


@pytest.mark.parametrize("content", [None, "", "gAAAAA==", "triptych:", "triptych:!", "triptych:/w=="])
def test_reasoning_that_cannot_be_read_is_empty(content: str | None) -> None:
    assert unpacked(content) == ""


def test_logprobs_of_a_streamed_response_are_those_of_its_text(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    Dictation(api, monkeypatch, TEXT)
    whole = api.ask(RESPONSES, input="hi", top_logprobs=0, seed=1)
    found = stream(api.http, RESPONSES, input="hi", top_logprobs=0, seed=1)
    assert found[-1].data["response"]["output"][1]["content"] == whole["output"][1]["content"]


def test_earlier_reasoning_reaches_the_template(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Dictation(api, monkeypatch, TEXT)
    for name in ("reasoning", "reasoning_content"):
        api.ask(CHAT, messages=[*MESSAGES, {"role": "assistant", "content": "x", name: "so"}, *MESSAGES])
        assert script.asked[-1]["messages"][1]["reasoning_content"] == "so"
    status, error = api.refusal(CHAT, messages=[{"role": "assistant", "reasoning_content": 1}])
    assert (status, error["param"]) == (400, "messages[0].reasoning_content")


def test_end_of_the_prompt_is_looked_up_once_per_set_of_variables(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Dictation(api, monkeypatch, "So.</think>Yes.")
    monkeypatch.setattr(
        "triptych.launch.gateway.reasoning.handling.START", "assistant:"
    )  # so the template ends, and space
    for _ in range(2):
        message = api.ask(CHAT, messages=MESSAGES, chat_template_kwargs={"a": 1})["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("So.", "Yes.")
    assert [asked["max_tokens"] == 0 for asked in script.asked] == [True, False, False]


def test_template_that_inspects_messages_is_looked_up_with_them(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Dictation(api, monkeypatch, "Yes.")
    messages = [{"role": "user", "content": "hi /no_think"}]
    for template, num_asked in (("</think>", 1), ("</think> {% if '/no_think' in m.content %}", 2)):
        facts = dataclasses.replace(api.gateway.facts, chat_template=template)
        monkeypatch.setitem(api.gateway.__dict__, "facts", facts)
        script.asked.clear()
        api.ask(CHAT, messages=messages)
        assert [asked["messages"] for asked in script.asked] == [messages] * num_asked


def test_end_of_the_prompt_is_looked_up_again_for_another_last_role(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-R1's template opens no reasoning after a tool result."""
    script = Dictation(api, monkeypatch, "Yes.", is_open=True)
    messages = [*MESSAGES, {"role": "assistant", "content": "so"}]
    for _ in range(2):
        assert api.ask(CHAT, messages=messages)["choices"][0]["message"]["content"] == "Yes."
    assert [asked["max_tokens"] == 0 for asked in script.asked] == [True, False, False]


def test_lookup_of_the_prompt_s_end_uses_the_request_s_settings(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Dictation(api, monkeypatch, "Yes.")
    monkeypatch.setattr(api.gateway, "open_prompts", {})
    service = {"cache_salt": "a", "priority": -3, "deadline_ms": 9e6, "max_queue_ms": 8e6}
    api.ask(CHAT, messages=MESSAGES, truncate_prompt_tokens=100, **service)
    question, asked = script.asked
    assert {name: question[name] for name in service} == {name: asked[name] for name in service} == service
    assert (question["truncation"], question["max_prompt_tokens"]) == ("left", 32)  # nothing but the end is computed


@pytest.mark.parametrize("asked", [{}, {"separate_reasoning": False}, {"continue_final_message": True}])
def test_tags_that_are_special_tokens_stay_in_the_text(
    api: Site, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    script = Dictation(api, monkeypatch, "Yes.")
    monkeypatch.setattr(api.gateway.words, "is_special_word", "</think>".__eq__)
    api.ask(CHAT, messages=[*MESSAGES, {"role": "assistant", "content": "<think>"}], **asked)
    assert script.asked[-1]["skip_special_tokens"] is False
