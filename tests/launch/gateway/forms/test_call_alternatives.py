"""Answers whose text must be JSON of some form, and which may call tools instead."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.scripted import script
from triptych import Driver
from triptych.launch.gateway.forms.calls import CallReader
from triptych.launch.gateway.forms.structure import call_alternative
from triptych.launch.gateway.requests.words import Words
from triptych.launch.gateway.schemas.chat import Tool
from triptych.launch.gateway.state import Gateway

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
DIGIT = {"type": "integer", "minimum": 1, "maximum": 9}
DAYS = {"type": "object", "properties": {"days": DIGIT}, "required": ["days"]}


def tools_of(schema: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "go")]


TOOLS = tools_of(DAYS)
NAME = {"type": "string", "enum": ["x", "f"]}
PERSON = {"type": "object", "properties": {"name": NAME}, "required": ["name"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
FLAT_FORMAT = {"type": "json_schema", "schema": PERSON}


@pytest.mark.parametrize("parser", ["hermes", "mistral", "llama3_json"])
def test_answer_with_a_form_may_call_tools_first(pipeline: Driver, parser: str) -> None:
    """As agents need that end with structured output: the form left no room for calls. The hash model does either."""
    with site(pipeline.run_dir, tool_parser=parser) as api:
        reply = api.ask(CHAT, messages=MESSAGES, tools=TOOLS, response_format=FORMAT, seed=1, n=8, max_tokens=2000)
    messages = [choice["message"] for choice in reply["choices"]]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    texts = [message["content"] for message in messages if "tool_calls" not in message]
    assert {*json.loads(calls[0]["arguments"])} == {"days"}
    assert {*json.loads(texts[0])} == {"name"}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_form_leaves_room_for_calls_in_every_api(scripted: Site, path: str) -> None:
    client = script(scripted, '<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    flat = [{"type": "function", **tool["function"]} for tool in cast(Any, TOOLS)]
    wanted: dict[str, Any] = {"input": "hi", "tools": flat, "text": {"format": FLAT_FORMAT}}
    if path == "/v1/messages":
        tools = [{"name": "f", "input_schema": DAYS}]
        wanted = {"messages": MESSAGES, "max_tokens": 9, "tools": tools, "output_format": FLAT_FORMAT}
    reply = scripted.ask(path, **wanted)
    assert [part["type"] for part in reply.get("output") or reply["content"]] in (["function_call"], ["tool_use"])
    assert "<tool_call>" in client.asked[0]["structured"]["grammar"]


def test_calls_of_llama_differ_from_any_json_by_the_name_of_a_tool(pipeline: Driver) -> None:
    """A form of any JSON object left no room for calls: what the model wrote as one was its answer."""
    texts = ['{"name": "Bob"}', '{"name": "Bob", "parameters": {}}', '{"name": "f", "parameters": {}, "a": 1}']
    call = '{"name": "f", "parameters": {}}'
    with site(pipeline.run_dir, tool_parser="llama3_json") as api:
        for answer in (*texts, call):
            client = script(api, answer)
            wanted = {"messages": MESSAGES, "tools": TOOLS, "response_format": {"type": "json_object"}}
            [choice] = api.ask(CHAT, **wanted)["choices"]
            assert choice["finish_reason"] == ("tool_calls" if answer == call else "stop")
            assert choice["message"]["content"] == (None if answer == call else answer)
            assert "calls" in client.asked[0]["structured"]["grammar"]


MARKS = (
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<|action_start|>",
    "<|plugin|>",
)
F, GO = '{"name": "f", "arguments": {"days": 3}}', '{"name": "go", "arguments": {"days": 4}}'
LLAMA_F, LLAMA_GO = F.replace("arguments", "parameters"), GO.replace("arguments", "parameters")
ONE: list[tuple[str, str, str]] = [  # parser, template, and an answer that is one call
    ("hermes", "", f"<tool_call>\n{F}\n</tool_call>"),
    ("mistral", "", f"[TOOL_CALLS] [{F}]"),
    ("mistral", "[ARGS]", '[TOOL_CALLS]f[ARGS]{"days": 3}'),
    ("mistral", "[ARGS]", '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"days": 3}'),
    ("qwen3_coder", "", "<tool_call>\n<function=f>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"),
    ("seed_oss", "", "<seed:tool_call>\n<function=f>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>"),
    ("glm45", "", "<tool_call>f\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"),
    ("llama3_json", "", LLAMA_F),
    ("llama3_json", "", f"<|python_tag|>{LLAMA_F}"),
    (
        "minimax",
        "",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    ("apertus", "", '<|tools_prefix|>[{"f": {"days": 3}}]<|tools_suffix|>'),
    ("granite", "", f"<|tool_call|>[{F}]"),
    ("granite", "<|tool|>", f"<|tool_call|>[{F}]<|/tool_call|>"),
    ("internlm", "", f"<|action_start|><|plugin|>\n{LLAMA_F}<|action_end|>"),
    ("lfm2", "```python", "<|tool_call_start|>\n```python\nf(days=3)\n```\n<|tool_call_end|>"),
]
TWO = [
    ("hermes", "", f"<tool_call>{F}</tool_call>\n<tool_call>{GO}</tool_call>"),
    ("mistral", "", f"[TOOL_CALLS][{F}, {GO}]"),
    ("mistral", "[ARGS]", '[TOOL_CALLS]f[ARGS]{"days": 3}[TOOL_CALLS]go[ARGS]{"days": 4}'),
    ("llama3_json", "", f"{LLAMA_F}; {LLAMA_GO}"),
    ("lfm2", "", "<|tool_call_start|>[f(days=3), go(days=4)]<|tool_call_end|>"),
    ("olmo3", "", "<function_calls>\nf(days=3)\ngo(days=4)\n</function_calls>"),
    ("pythonic", "", "[f(days=3), go(days=4)]"),
    ("granite", "functools[", f"functools[{F}, {GO}]"),
    ("jamba", "", f"<tool_calls>[{F}, {GO}]</tool_calls>"),
    ("nemotron", "", f"<TOOLCALL>[{F}, {GO}]</TOOLCALL>"),
    (
        "cohere",
        "",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"days": 3}},\n'
        '    {"tool_call_id": "1", "tool_name": "go", "parameters": {"days": 4}}\n]<|END_ACTION|>',
    ),
    (
        "deepseek",
        "```json",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>go\n```json\n{"days": 4}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "deepseek",
        "",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"days": 3}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>go<｜tool▁sep｜>{"days": 4}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    (
        "hunyuan",
        "",
        '<tool_calls>\n<tool_call>f\n```json\n{"days": 3}\n```\n</tool_call>\n<tool_call>go\n```json\n'
        '{"days": 4}\n```\n</tool_call>\n</tool_calls>',
    ),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token per byte, and one per mark, as the models have."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", *MARKS])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


def allows(
    tokenizer: Tokenizer, parser: str, template: str, text: str, *, single: bool = False, arguments: Any = DAYS
) -> bool:
    """Whether the form allows this answer, in the tokens that the model would write."""
    named: Any = SimpleNamespace(
        tool_parser=parser, words=Words(tokenizer), facts=SimpleNamespace(chat_template=template)
    )
    tools = [Tool.model_validate(tool) for tool in tools_of(arguments)]
    form = call_alternative(cast(Gateway, named), {"json_schema": PERSON}, tools, single=single)
    assert form is not None
    own = LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.encode("</s>").ids)
    matcher = LLMatcher(own, LLMatcher.grammar_from_lark(form["grammar"]))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(("parser", "template", "text"), [*ONE, *TWO])
def test_form_allows_the_calls_that_the_model_writes(
    tokenizer: Tokenizer, parser: str, template: str, text: str, single: bool
) -> None:
    """The marks are tokens of their own, which a grammar does not count as text."""
    is_two = (parser, template, text) in TWO
    assert allows(tokenizer, parser, template, text, single=single) is not (single and is_two)
    reader = CallReader("llama3f" if parser == "llama3_json" else parser)
    assert len([*reader.push(text), *reader.flush()]) == 1 + is_two
    assert allows(tokenizer, parser, template, '{"name": "f"}')
    assert not allows(tokenizer, parser, template, text.replace("days", "day"))


EDIT = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "how": {"enum": ["a", "b"]}, "at": {"$ref": "#/$defs/place"}},
    "required": ["text", "at"],
    "$defs": {"place": DIGIT},
}


@pytest.mark.parametrize("how", ["", "a", "c"])
@pytest.mark.parametrize("parser", ["qwen3_coder", "glm45", "minimax"])
def test_form_allows_any_text_between_the_tags_of_an_argument(tokenizer: Tokenizer, parser: str, how: str) -> None:
    before, middle, after = ("<parameter=", ">\n", "\n</parameter>\n")
    head, end = "<tool_call><function=f>\n", "</function></tool_call>"
    if parser == "glm45":
        before, middle, after = "<arg_key>", "</arg_key><arg_value>", "</arg_value>\n"
        head, end = "<tool_call>f\n", "</tool_call>"
    if parser == "minimax":
        before, middle, after = '<parameter name="', '">', "</parameter>\n"
        head, end = '<minimax:tool_call><invoke name="f">\n', "</invoke></minimax:tool_call>"
    values = {"text": 'a "<\n</b>\n', **({"how": how} if how else {}), "at": "3"}
    text = head + "".join(f"{before}{key}{middle}{value}{after}" for key, value in values.items()) + end
    assert allows(tokenizer, parser, "", text, arguments=EDIT) is (how != "c")
    [call] = CallReader(parser, {"f": EDIT}).push(text)
    assert json.loads(cast(Any, call).arguments) == {**values, "at": 3}


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('f(text="a)", how="b", at=3)', True),
        ('f(text="a", at=3)', True),
        ('f(text="a")', False),
        ('f(text="a" at=3)', False),
        ("f(at=3)", False),
    ],
)
def test_form_allows_optional_arguments_in_the_syntax_of_python(
    tokenizer: Tokenizer, text: str, is_allowed: bool
) -> None:
    assert allows(tokenizer, "pythonic", "", f"[{text}]", arguments=EDIT) is is_allowed
    optional = {"type": "object", "properties": EDIT["properties"], "$defs": EDIT["$defs"]}
    assert allows(tokenizer, "pythonic", "", f"[{text}]", arguments=optional) is (" at" not in text or ", at" in text)
