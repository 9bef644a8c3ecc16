"""An answer is parsed into the same parts however its text is split into pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.launch.gateway.anthropic.test_messages import built, without_ids
from tests.launch.gateway.sse import Event
from triptych.launch.gateway.answer import AnswerReader, Parts
from triptych.launch.gateway.anthropic.blocks import BlockWriter, blocks_of
from triptych.launch.gateway.forms.calls import ToolUse
from triptych.launch.gateway.reasoning.handling import Reasoning
from triptych.launch.gateway.reasoning.thoughts import Thought

CALL = '<tool_call>{"name": "time", "arguments": {"a": 1}}</tool_call>'
WORDS = (
    "<think>", "</think>", "<thi", "</th", " ", "\n", "\u3000", "a", "b ", "<tool_call>", "</tool_call>", CALL,
    '{"name": "f", "arguments": {}}', "{", "}", "[", "]", ",", ";", "[TOOL_CALLS]", "<|python_tag|>",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS), max_size=9).map("".join)
CUTS = st.sets(st.integers(0, 60))
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other tests use the machine too
CHANNELS = st.lists(st.sampled_from((
    "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|channel|>commentary to=functions.f<|message|>",
    "<|start|>assistant", "<|end|>", "<|call|>", "<|message|>", "{}", " ", "a", "b<", "\n",
)), max_size=9).map("".join)  # fmt: skip
PREAMBLE = "<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b<|end|>"
PARSERS = ("none", "hermes", "llama3_json", "mistral", "required", "named:f")


def reader_of(parser: str, is_open: bool) -> AnswerReader:
    return AnswerReader(Reasoning(is_split=True, is_open=is_open), ToolUse(parser=parser))


def pieces(text: str, cuts: set[int]) -> list[str]:
    return [text[start:end] for start, end in pairwise([0, *sorted(cut for cut in cuts if cut < len(text)), len(text)])]


def joined(parts: Parts) -> Parts:
    """Merge neighbours of the same kind."""
    found: Parts = []
    for part in parts:
        match (found[-1] if found else None), part:
            case Thought(before), Thought(text):
                found[-1] = Thought(before + text)
            case str(before), str(text):
                found[-1] = before + text
            case _:
                found.append(part)
    return found


def events_of(payload: bytes) -> list[Event]:
    found = [json.loads(event.partition("data: ")[2]) for event in payload.decode().split("\n\n")[:-1]]
    return [Event(data, None, data["type"]) for data in found]


@pytest.mark.parametrize("parser", PARSERS)
@UNHURRIED
@given(text=TEXTS, cuts=CUTS, is_open=st.booleans())
@example(text="<think><think>a", cuts={7}, is_open=True)  # one start tag is the template's, the other one the model's
def test_parts_of_an_answer_do_not_depend_on_its_pieces(parser: str, text: str, cuts: set[int], is_open: bool) -> None:
    reader = reader_of(parser, is_open)
    found = [part for piece in pieces(text, cuts) for part in reader.push(piece)] + reader.flush()
    assert joined(found) == joined(reader_of(parser, is_open).read(text))


@pytest.mark.parametrize("parser", ["none", "harmony"])
@UNHURRIED
@given(text=CHANNELS, cuts=CUTS)
@example(text=2 * PREAMBLE, cuts=set())
def test_parts_of_an_answer_in_channels_keep_their_order_in_any_pieces(parser: str, text: str, cuts: set[int]) -> None:
    reader, whole = (AnswerReader(Reasoning(True, has_channels=True), ToolUse(parser=parser)) for _ in range(2))
    found = [part for piece in pieces(text, cuts) for part in reader.push(piece)] + reader.flush()
    assert joined(found) == joined(whole.read(text))
    if text == 2 * PREAMBLE:
        assert joined(found) == [Thought("a"), "b", Thought("\na"), "b"]


@pytest.mark.parametrize("parser", PARSERS)
@UNHURRIED
@given(text=TEXTS, cuts=CUTS, is_open=st.booleans())
@example(text=f" {CALL}a", cuts=set(), is_open=False)  # white space before a call does not belong to the text after it
def test_message_events_describe_the_blocks_of_the_complete_message(
    parser: str, text: str, cuts: set[int], is_open: bool
) -> None:
    expected, found = blocks_and_events(text, cuts, partial(reader_of, parser, is_open))
    assert found == expected


@UNHURRIED
@given(text=CHANNELS, cuts=CUTS)
def test_message_events_describe_the_blocks_of_channels(text: str, cuts: set[int]) -> None:
    reasoning, tools = Reasoning(True, has_channels=True), ToolUse(parser="harmony")
    expected, found = blocks_and_events(text, cuts, lambda: AnswerReader(reasoning, tools))
    assert found == expected
    assert all(block["thinking"][:1].strip() for block in found if block["type"] == "thinking")


def blocks_and_events(text: str, cuts: set[int], new_reader: Callable[[], AnswerReader]) -> list[list[dict[str, Any]]]:
    """The blocks of the complete message, and those that events of these pieces describe."""
    whole, reader = new_reader(), new_reader()
    writer = BlockWriter(reader)
    parts = [reader.push(piece) for piece in pieces(text, cuts)] + [reader.flush()]
    payload = b"".join(event for each in parts for event in writer.parts(each)) + b"".join(writer.close())
    return [without_ids(blocks) for blocks in (blocks_of(whole.read(text), whole), built(events_of(payload)))]
