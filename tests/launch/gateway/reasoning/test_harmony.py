"""Answers in harmony channels are split into reasoning, text and calls, however the text is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.launch.gateway.anthropic.test_messages import BASE, TOOL, built, without_ids
from tests.launch.gateway.anthropic.test_messages import PATH as ANTHROPIC
from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.reasoning.test_reasoning import CHAT, MESSAGES, RESPONSES, TOOLS, reasoning_of
from tests.launch.gateway.scripted import Dictation, ScriptedClient
from tests.launch.gateway.sse import stream, text_of
from triptych.driver import driver as drivers
from triptych.launch.gateway.reasoning.handling import Reasoning
from triptych.launch.gateway.reasoning.harmony import HarmonyReader, thoughts_in
from triptych.launch.gateway.reasoning.thoughts import find_reasoning_parser
from triptych.launch.gateway.requests.ids import new_id, read_id
from triptych.launch.gateway.requests.words import Words
from triptych.launch.gateway.tools.harmony import HarmonyParser
from triptych.launch.gateway.tools.parser import Call, find_parser

THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|>"
OPEN_THOUGHT = THOUGHT.removesuffix("<|end|>")  # where the hash model ends
FINAL = "<|start|>assistant<|channel|>final<|message|>It is <b>."
CALL = '<|start|>assistant<|channel|>commentary to=functions.time <|constrain|>json<|message|>{"a": 1}<|call|>'
EDIT = CALL.replace(" <|constrain|>json", "").replace("1}", '"<|call|><|end|>"}')
TOLD = '<|channel|>commentary to=functions.time<|message|>{"a": 1}'
RESPONSE_TOOLS = [{"type": "function", "name": "time", "parameters": {"type": "object"}}]
CASES = {
    "thoughts and an answer": (THOUGHT + FINAL, "Let me see.", "It is <b>."),
    "its end mark": (THOUGHT + FINAL + "<|return|>", "Let me see.", "It is <b>."),
    "no thoughts": (FINAL.removeprefix("<|start|>assistant"), "", "It is <b>."),
    "twice": (THOUGHT + "<|start|>assistant" + THOUGHT + FINAL, "Let me see.\nLet me see.", "It is <b>."),
    "a preamble": (THOUGHT + FINAL.replace("final", "commentary") + "<|end|>" + FINAL, "Let me see.", "It is <b>." * 2),
    "a call": (THOUGHT + CALL, "Let me see.", f"{TOLD}<|call|>"),
    "marks in a string of a call": (THOUGHT + EDIT, "Let me see.", EDIT.removeprefix("<|start|>assistant")),
    "a call without its end": (THOUGHT + CALL.removesuffix("<|call|>"), "Let me see.", TOLD),
    "to whom stands first": (
        "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{\"a\": 1}<|call|>", "",
        f"{TOLD}<|call|>",
    ),
    "no end mark": (THOUGHT.removesuffix("<|end|>") + FINAL, "Let me see.", "It is <b>."),
    "cut within thoughts": (THOUGHT.removesuffix("e.<|end|>"), "Let me se", ""),
    "cut in a mark": (THOUGHT + "<|start|>assistant<|chan", "Let me see.", ""),
    "no marks at all": ("It is <b>.", "", "It is <b>."),
    "a mark for others": ("I <|message|> you", "", "I <|message|> you"),
    "a head without an end": ("<|channel|>" + "x" * 600, "", "<|channel|>" + "x" * 600),
    "another one": ("<|start|>" + "x" * 600 + FINAL, "", "<|start|>" + "x" * 600 + "It is <b>."),
    "a tool's part": ("<|start|>functions.time to=assistant<|channel|>commentary<|message|>12", "", "12"),
    "nothing": ("", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_channels_are_split_however_the_text_is_cut(case: tuple[str, str, str]) -> None:
    text, *expected = case
    for size in (1, 3, 10_000):
        reader = HarmonyReader()
        found = [reader.push(text[start : start + size]) for start in range(0, len(text), size)]
        thoughts, answers = zip(*found, reader.flush(), strict=True)
        assert ["".join(thoughts), "".join(answers)] == expected, f"in parts of {size} characters"


PIECES = st.sampled_from([
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "assistant", "analysis", "final",
    "commentary", " to=functions.f", " ", "text", "x" * 500,
])  # fmt: skip


@settings(deadline=None)
@given(pieces=st.lists(PIECES, max_size=12), data=st.data())
def test_any_text_is_split_equally_in_any_pieces(pieces: list[str], data: st.DataObject) -> None:
    text, whole, cut, start = "".join(pieces), HarmonyReader(), HarmonyReader(), 0
    expected = [whole.push(text), whole.flush()]
    found = []
    while start < len(text):
        size = data.draw(st.integers(1, 40))
        found.append(cut.push(text[start : start + size]))
        start += size
    found.append(cut.flush())
    for side in (0, 1):
        assert "".join(part[side] for part in found) == "".join(part[side] for part in expected)


def test_only_a_possible_marker_is_held_back() -> None:
    reader = HarmonyReader()
    pieces = ("<|channel|>final", "<|message|>So", " <|en", "d", " of <", "|end|>")
    assert [reader.push(text)[1] for text in pieces] == ["", "So", " ", "", "<|end of ", ""]
    assert not reader.is_holding
    plain = HarmonyReader()
    assert [plain.push(text) for text in (" It", " rains")] == [("", " It"), ("", " rains")]


@pytest.mark.parametrize(
    ("text", "thoughts"),
    [
        (THOUGHT + FINAL, [THOUGHT]),
        (FINAL, []),
        ("hi", []),
        (THOUGHT[:40], [THOUGHT[:40]]),
        (f"{THOUGHT}\xff{THOUGHT}", [THOUGHT]),  # marks in a text
        (f"{THOUGHT}{THOUGHT}{CALL}", [THOUGHT, THOUGHT]),
        (f"{OPEN_THOUGHT}{FINAL}<|start|>assistant{THOUGHT}{CALL}", [OPEN_THOUGHT, f"<|start|>assistant{THOUGHT}"]),
        (f"{THOUGHT}{FINAL}<|end|>{OPEN_THOUGHT}", [THOUGHT, OPEN_THOUGHT]),
    ],
)
def test_reasoning_is_counted_in_its_channel(text: str, thoughts: list[str]) -> None:
    assert [text[begin:end] for begin, end in thoughts_in(text.encode("latin-1"))] == thoughts


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"So: {TOLD}<|call|>", ["So: ", Call("time", '{"a": 1}')]),
        (TOLD, [Call("time", '{"a": 1}')]),
        (TOLD.replace('{"a": 1}', ""), [Call("time", "{}")]),
        (TOLD.replace("<|message|>", " <|constrain|>json<|message|>"), [Call("time", '{"a": 1}')]),
        (f"{TOLD[:-1]}<|call|>", [f"{TOLD[:-1]}<|call|>"]),  # invalid JSON is text
        (TOLD.removesuffix('<|message|>{"a": 1}'), [TOLD.removesuffix('<|message|>{"a": 1}')]),
    ],
)
def test_calls_are_found(text: str, found: list[str | Call]) -> None:
    parser = HarmonyParser()
    assert parser.push(text) + parser.flush() == found


def test_harmony_is_detected_from_the_template() -> None:
    template = '<|start|>assistant<|channel|>analysis<|message|>{{ thinking }} <|channel|>commentary json "parameters"'
    assert (find_reasoning_parser("auto", template), find_parser("auto", template)) == ("harmony", "harmony")


@pytest.fixture(scope="module")
def api(pipeline: drivers.Driver) -> Iterator[Site]:
    with site(pipeline.run_dir, reasoning_parser="harmony", tool_parser="harmony") as api:
        yield api


def test_form_is_asked_for_in_the_final_channel(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Words, "are_tokens", lambda words, *texts: True)
    status, error = api.refusal(CHAT, messages=MESSAGES, structured_outputs={"choice": ["yes"]})
    assert (status, error["param"]) == (400, "structured_outputs")
    assert "after_reasoning is true, but neither <think> and </think> nor <|channel|>" in error["message"]


def test_reasoning_has_its_own_field(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    dictation = Dictation(api, monkeypatch, OPEN_THOUGHT + FINAL)
    reply = api.ask(CHAT, messages=MESSAGES)
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "It is <b>.")
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(OPEN_THOUGHT)  # a token is a byte
    assert dictation.asked[-1]["skip_special_tokens"] is False
    found = stream(api.http, CHAT, messages=MESSAGES)
    assert (reasoning_of(found), text_of(found)) == ("Let me see.", "It is <b>.")


def test_items_of_a_response_are_whole_where_reasoning_follows_text(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before a call: the model reasons, tells what it is about to do, and reasons again."""
    preamble, asked = FINAL.replace("final", "commentary"), {"input": "hi", "tools": RESPONSE_TOOLS}
    monkeypatch.setattr(api.gateway, "client", ScriptedClient(THOUGHT, preamble, f"<|end|>{THOUGHT}", CALL))
    whole = api.ask(RESPONSES, **asked)["output"]
    assert [item["type"] for item in whole] == ["reasoning", "message", "reasoning", "function_call"]
    assert [item["content"][0]["text"] for item in whole[:3]] == ["Let me see.", "It is <b>.", "Let me see."]
    found = [event.data for event in stream(api.http, RESPONSES, **asked)]
    output = found[-1]["response"]["output"]
    assert [item.get("content") for item in output] == [item.get("content") for item in whole]
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == output
    added = [event for event in found if event["type"] == "response.output_item.added"]
    assert [(event["output_index"], event["item"]["id"]) for event in added] == list(enumerate(i["id"] for i in output))
    assert all(output[event["output_index"]]["id"] == event["item_id"] for event in found if "item_id" in event)


@pytest.mark.parametrize("between", ["It is <b>.", "\n"], ids=["text", "white space"])
def test_anthropic_s_blocks_are_whole_where_reasoning_follows_text(
    api: Site, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    preamble, asked = FINAL.replace("final", "commentary").replace("It is <b>.", between), {**BASE, "tools": [TOOL]}
    monkeypatch.setattr(api.gateway, "client", ScriptedClient(THOUGHT, preamble, f"<|end|>{THOUGHT}", CALL))
    whole = api.ask(ANTHROPIC, **asked)["content"]
    told = [(block["type"], block.get("thinking") or block.get("text")) for block in whole]
    first, text, call = ("thinking", "Let me see."), ("text", between), ("tool_use", None)
    expected = [first, text, first, call] if between.strip() else [("thinking", "Let me see.\nLet me see."), call]
    assert told == expected
    assert without_ids(built(stream(api.http, ANTHROPIC, **asked)[1:-2])) == without_ids(whole)


@pytest.mark.parametrize("more", [{}, {"include_reasoning": False}, {"tools": TOOLS}])
def test_logprobs_cover_the_content_and_no_markers(
    api: Site, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    asked = {"messages": MESSAGES, "logprobs": True, **more}
    Dictation(api, monkeypatch, OPEN_THOUGHT + FINAL)
    entries = api.ask(CHAT, **asked)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries).startswith("It is <b>.")
    choices = [event.data["choices"][0] for event in stream(api.http, CHAT, **asked)[1:-1]]
    assert [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())] == entries
    assert all("content" in choice["delta"] for choice in choices if choice["logprobs"])


def test_tool_is_called(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    Dictation(api, monkeypatch, OPEN_THOUGHT + CALL)
    [choice] = api.ask(CHAT, messages=MESSAGES, tools=TOOLS)["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Let me see.", None)
    assert (call["function"], choice["finish_reason"]) == ({"name": "time", "arguments": '{"a": 1}'}, "tool_calls")
    found = stream(api.http, CHAT, messages=MESSAGES, tools=TOOLS)
    assert (reasoning_of(found), text_of(found)) == ("Let me see.", "")


def test_call_may_take_the_place_of_the_form(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient(THOUGHT + CALL)
    monkeypatch.setattr(api.gateway, "client", client)
    monkeypatch.setattr(Words, "are_tokens", lambda words, *texts: True)
    wanted = {"messages": MESSAGES, "tools": TOOLS, "response_format": {"type": "json_object"}}
    [choice] = api.ask(CHAT, **wanted)["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["time"]
    assert client.asked[0]["structured"] == {"json_object": True, "after_reasoning": True, "or_call": True}
    assert client.asked[0]["skip_special_tokens"] is False


def test_raw_text_is_returned_with_separate_reasoning_false(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    Dictation(api, monkeypatch, OPEN_THOUGHT + FINAL)
    message = api.ask(CHAT, messages=MESSAGES, separate_reasoning=False)["choices"][0]["message"]
    assert message["content"] == OPEN_THOUGHT + FINAL


@pytest.mark.parametrize("is_told", [True, False])
def test_id_tells_that_the_answer_has_channels(is_told: bool) -> None:
    reasoning = Reasoning(True, is_told=is_told, has_channels=True)
    read = read_id(new_id("chatcmpl.harmony", num_choices=3, thoughts=reasoning.mark))
    assert (read.parser, Reasoning.of_mark(read.thoughts)) == ("harmony", reasoning)
