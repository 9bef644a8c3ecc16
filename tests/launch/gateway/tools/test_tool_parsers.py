"""The syntax of tool calls of each model family."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.launch.gateway.config import PARSERS_OF_SGLANG, PARSERS_OF_VLLM, TOOL_PARSERS, GatewayConfig
from triptych.launch.gateway.errors import ApiError
from triptych.launch.gateway.requests.chat_messages import json_text
from triptych.launch.gateway.tools.parser import Call, Found, PlainText, find_parser, make_parser
from triptych.launch.gateway.tools.values import value_of

WEATHER = Call("weather", '{"city": "Rom {}"}')
TIME = Call("time", "{}")
END = "</tool_call>"
EDIT = f'{{"a": "{END}\\\\"}}'  # as of an agent that edits prompts
HALF = r'{"a": "\ud83d"}'  # of a surrogate pair: JSON can spell it, and no reply can contain it
CASES: list[tuple[str, str, Found]] = [
    ("hermes", "plain text < and <tool", ["plain text < and <tool"]),
    ("hermes", 'so: <tool_call>\n{"name": "weather", "arguments": {"city": "Rom {}"}}\n</tool_call>',
     ["so: ", WEATHER]),
    ("hermes", '<tool_call>{"name":"weather","arguments":{"city": "Rom {}"}}</tool_call>\n<tool_call>{"name":"time"}'
     "</tool_call>", [WEATHER, "\n", TIME]),
    ("hermes", '<tool_call>{"name": "time", "arguments": "{}"}', [TIME]),  # the end of sequence instead of the tag
    ("hermes", "<tool_call>no json</tool_call>!", ["<tool_call>no json</tool_call>!"]),
    ("hermes", "<tool_call>{cut", ["<tool_call>{cut"]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": "{END}\\\\"}}}}{END}x', [Call("f", EDIT), "x"]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": "{END}\\\\"}}}}', [Call("f", EDIT)]),
    ("hermes", f'<tool_call>{{"a": "5"" {END} so <tool_call>{{"name": "time"}}{END}',  # a quote too many
     [f'<tool_call>{{"a": "5"" {END} so ', TIME]),
    ("hermes", f'<tool_call>{{"a": " {END} so', [f'<tool_call>{{"a": " {END} so']),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}', ['<tool_call>{"name": "", "arguments": {}}']),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}', ['<tool_call>{"name": 5, "arguments": {}}']),
    ("hermes", '<tool_call>{"name": "time", "arguments": null}', [TIME]),
    ("llama3_json", '{"name": "time", "parameters": ""}', [TIME]),
    ("hermes", "so: <tool_call>", ["so: <tool_call>"]),
    ("mistral", "plain [TOOL", ["plain [TOOL"]),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rom {}"}}, {"name": "time"}]',
     [WEATHER, TIME]),
    ("mistral", 'a[TOOL_CALLS]weather[ARGS]{"city": "Rom {}"}[TOOL_CALLS]time{}', ["a", WEATHER, TIME]),
    ("mistral", "[TOOL_CALLS]time[CALL_ID]a1b2c3d4e[ARGS]{}", [TIME]),
    ("mistral", '[TOOL_CALLS] [{"name": "time"}', [TIME]),  # a cut list
    ("mistral", '[TOOL_CALLS] [{"name": "time"}, {"na', [TIME, ', {"na']),
    ("mistral", "[TOOL_CALLS]time{}[TOOL_CALLS]weather[ARGS]{", [TIME, "[TOOL_CALLS]weather[ARGS]{"]),
    ("mistral", '[TOOL_CALLS] [{"na', ['[TOOL_CALLS] [{"na']),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}', [Call("f", '{"a": "[TOOL_CALLS]"}')]),
    ("mistral", "[TOOL_CALLS]nothing", ["[TOOL_CALLS]nothing"]),
    ("llama3_json", "plain { text", ["plain { text"]),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Rom {}"}}', [WEATHER]),
    ("llama3_json", '<|python_tag|>{"name": "weather", "parameters": {"city": "Rom {}"}}; '
     '{"name": "time", "parameters": {}}', [WEATHER, TIME]),
    ("llama3_json", '{"name": "time", "parameters": {}}; {"name": "time", "par',
     [TIME, '; {"name": "time", "par']),
    ("llama3_json", '{"name": "time", "parameters": {}} so: ', [TIME, " so: "]),
    ("llama3_json", '{"name": "Bob", "age": 3}', ['{"name": "Bob", "age": 3}']),
    ("llama3f", '{"name": "Bob"}', ['{"name": "Bob"}']),  # beside a form
    ("llama3f", '{"name": "Bob", "parameters": {}}', ['{"name": "Bob", "parameters": {}}']),
    ("llama3f", '{ "name": "time", "parameters": {}}', [TIME]),
    ("llama3f", '{"age": 1}', ['{"age": 1}']),
    ("llama3_json", '{"a": 1}', ['{"a": 1}']),
    ("llama3_json", "{not json", ["{not json"]),
    ("required", '[{"name": "weather", "arguments": {"city": "Rom {}"}} ,\n{"name": "time", "arguments": {}}]',
     [WEATHER, TIME]),
    ("required", '[{"name": "time", "arguments": {}}, {"name": "wea', [TIME]),
    ("required", '[{"name": "ti', ['[{"name": "ti']),
    ("required", r'[{"name": "time", "arguments": "{\"}{\\\\"}, {"name": "time"}]', [Call("time", r'{"}{\\'), TIME]),
    ("named:time", "{}", [TIME]),
    ("hermes", r'<tool_call>{"name": "time", "arguments": {"a": "\ud83d"}}</tool_call>', [Call("time", HALF)]),
    ("hermes", r'<tool_call>{"name": "\ud83d"}</tool_call>', [r'<tool_call>{"name": "\ud83d"}</tool_call>']),
    ("mistral", r'[TOOL_CALLS]time{"a": "\ud83d"}', [Call("time", HALF)]),
    ("required", r'[{"name": "time", "arguments": "{\"a\": \"\ud83d\"}"}]', [Call("time", HALF)]),
    # What Python reads as a number and JSON has not: clients could not read the call.
    ("hermes", '<tool_call>{"name": "f", "arguments": [NaN]}', ['<tool_call>{"name": "f", "arguments": [NaN]}']),
    ("llama3_json", '{"name": "f", "parameters": {"a": -Infinity}}', ['{"name": "f", "parameters": {"a": -Infinity}}']),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1e999}', ['[TOOL_CALLS]f[ARGS]{"a": 1e999}']),
    ("pythonic", "[f(a=[1e999])]", ["[f(a=[1e999])]"]),
    ("glm45", f"<tool_call>f<arg_key>a</arg_key><arg_value>NaN</arg_value><arg_key>b</arg_key><arg_value>[NaN]"
     f"</arg_value>{END}", [Call("f", '{"a": "NaN", "b": "[NaN]"}')]),
    ("qwen3_coder", 'so <tool_call>\n<function=weather>\n<parameter=city>\n  "Rom"\n\n</parameter>\n'
     "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
     ["so ", Call("weather", r'{"city": "  \"Rom\"\n", "days": 3}')]),
    ("qwen3_coder", "<tool_call><function=time></function></tool_call>\n<tool_call>\n<function=time>\n</function>",
     [TIME, "\n", TIME]),
    ("qwen3_coder", f"<tool_call><function=f>\n<parameter=a>\n{END}</parameter>\\</parameter>\n{END}x",
     [Call("f", r'{"a": "</tool_call></parameter>\\"}'), "x"]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter>\n<parameter=b>\n2",  # cut
     ["<tool_call><function=f><parameter=a>1</parameter>\n<parameter=b>\n2"]),
    ("qwen3_coder", f"<tool_call>no{END} so <tool_call><function=time></function>{END}",
     [f"<tool_call>no{END} so ", TIME]),
    ("qwen3_coder", f"so <function=weather>\n<parameter=city>\n</function></parameter>\n</function>\n{END}\n"
     "<function=time>\n</function> <f",  # without the first tag
     ["so ", Call("weather", '{"city": "</function>"}'), "\n", TIME, " <f"]),
    ("qwen3_coder", "<function=f></function> is no tool", ["<function=f></function> is no tool"]),
    ("qwen3_coder", "<function=f> is a tag", ["<function=f> is a tag"]),
    ("seed_oss", "<seed:tool_call>\n<function=f>\n<parameter=a>\nx</parameter>\n</function>\n</seed:tool_call>",
     [Call("f", r'{"a": "\nx"}')]),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value> 5 </arg_value>\n<arg_key>days</arg_key>\n"
     f"<arg_value>[true]</arg_value>\n{END}", [Call("weather", '{"city": " 5 ", "days": [true]}')]),
    ("glm45", f"<tool_call>time{END}<tool_call>f<arg_key>a</arg_key><arg_value>{END}\\</arg_value>{END}",
     [TIME, Call("f", EDIT)]),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>",  # cut
     ["<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>"]),
    ("glm45", f"<tool_call>not a name{END}", [f"<tool_call>not a name{END}"]),
    ("none", "<tool_call>{}</tool_call>", ["<tool_call>{}</tool_call>"]),
    ("minimax", 'so <minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">\n5</parameter>\n'
     '<parameter name="days">[1]</parameter>\n</invoke>\n<invoke name="time">\n</invoke>\n</minimax:tool_call> x',
     ["so ", Call("weather", r'{"city": "\n5", "days": [1]}'), TIME, " x"]),
    ("minimax", '<minimax:tool_call><invoke name="f"><parameter name="a"></invoke></minimax:tool_call></parameter>'
     "</invoke></minimax:tool_call>", [Call("f", '{"a": "</invoke></minimax:tool_call>"}')]),
    ("minimax", '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke>\n<invo',  # cut
     [Call("f", '{"a": 1}'), "\n<invo"]),
    ("minimax", "<minimax:tool_call>no</minimax:tool_call>", ["<minimax:tool_call>no</minimax:tool_call>"]),
    ("lfm2", "so <|tool_call_start|>[weather(city='Rom {}'), time()]<|tool_call_end|> x", ["so ", WEATHER, TIME, " x"]),
    ("lfm2", "<|tool_call_start|>[f(a=\"<|tool_call_end|>)]\\\"\", b=[1, -.5, {'c': (None,)}, {}], d=False, e=true,)",
     [Call("f", r'{"a": "<|tool_call_end|>)]\"", "b": [1, -0.5, {"c": [null]}, {}], "d": false, "e": true}')]),
    ("lfm2", "<|tool_call_start|>[f(a='it's Bob's', b='\\u00e9\\n\\d'), time(",  # cut, and quotes without escapes
     [Call("f", r"""{"a": "it's Bob's", "b": "é\n\\d"}"""), ", time("]),
    ("lfm2", '<|tool_call_start|>[{"name": "weather", "arguments": {"city": "Rom {}"}}]<|tool_call_end|>', [WEATHER]),
    ("lfm2", "<|tool_call_start|>[f(5)]", ["<|tool_call_start|>[f(5)]"]),
    ("lfm2", "<|tool_call_start|>[f(a={1})]", ["<|tool_call_start|>[f(a={1})]"]),
    ("lfm2", "<|tool_call_start|>[f(a=b)]<|tool_call_end|>", ["<|tool_call_start|>[f(a=b)]<|tool_call_end|>"]),
    ("lfm2", "<|thought_start|>\nso\n<|thought_end|>\n<|tool_call_start|>\n```python\nweather(city=\"Rom {}\")\n"
     "time()\n```\n<|tool_call_end|>\n", ["\nso\n\n", WEATHER, TIME]),  # MiniCPM3
    ("olmo3", "<function_calls>\nweather(city='Rom {}')\ntime()\n</function_calls>", [WEATHER, TIME]),
    ("pythonic", '[weather(city="Rom {}"), time()] x', [WEATHER, TIME, " x"]),
    ("pythonic", "[1](a) b", ["[1](a) b"]),
    ("pythonic", "[f(x)] is", ["[f(x)] is"]),
    ("xlam", '[{"name": "weather", "arguments": {"city": "Rom {}"}}, {"name": "time"}]', [WEATHER, TIME]),
    ("xlam", '[{"na": 1}]', ['[{"na": 1}]']),
    ("granite", 'so <|tool_call|>[{"name": "weather", "arguments": {"city": "Rom {}"}}, {"name": "ti',
     ["so ", WEATHER, ', {"name": "ti']),
    ("granite", '<|tool_call|>{"name": "f", "arguments": {"a": "<|/tool_call|>"}}<|/tool_call|><|tool_call|>'
     '{"name": "time"}<|/tool_call|> x', [Call("f", '{"a": "<|/tool_call|>"}'), TIME, " x"]),
    ("granite", 'functools[{"name": "time", "arguments": {}}]', [TIME]),
    ("granite", "functools[] <|tool_ca", ["functools[] <|tool_ca"]),
    ("nemotron", '<TOOLCALL>[{"name": "time", "arguments": {}}]</TOOLCALL>', [TIME]),
    ("jamba", '<tool_calls>[\n{"name": "time", "arguments": {}}\n]</tool_calls>\n', [TIME]),
    ("internlm", '<|action_start|><|plugin|>\n{"name": "time", "parameters": {}}<|action_end|>', [TIME]),
    ("apertus", '<|tools_prefix|>[{"weather": {"city": "Rom {}"}}, {"time": {}}]<|tools_suffix|>', [WEATHER, TIME]),
    ("apertus", "<|tools_prefix|>[{}]", ["<|tools_prefix|>[{}]"]),
    ("apertus", "<|tools_prefix|>[[1]]", ["<|tools_prefix|>[[1]]"]),
    ("cohere", '<|START_THINKING|>So.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", '
     '"tool_name": "weather", "parameters": {"city": "Rom {}"}},\n    {"tool_call_id": "1", "tool_name": "time", '
     '"parameters": {}}\n]<|END_ACTION|>', ["So.", WEATHER, TIME]),
    ("cohere", "<|START_RESPONSE|>So.<|END_RESPONSE|>", ["So."]),
    ("gemma", "so <start_function_call>call:weather{city:<escape>Rom {}<escape>}<end_function_call>"
     "<start_function_call>call:time{}<end_function_call> x", ["so ", WEATHER, TIME, " x"]),
    ("gemma", "<start_function_call>call:f{a:<escape>,b:}<end_function_call><escape>,"
     "c:{d:[1,<escape>e<escape>],f:true}}",
     [Call("f", '{"a": ",b:}<end_function_call>", "c": {"d": [1, "e"], "f": true}}')]),
    ("gemma", "<start_function_call>call:f{a:b}", ["<start_function_call>call:f{a:b}"]),
    ("deepseek", "so <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
     '{"city": "Rom {}"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", ["so ", WEATHER, TIME]),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rom {}"}<｜tool▁call▁end｜>'
     "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [WEATHER, TIME]),  # V3.1
    ("hunyuan", '<tool_calls>\n<tool_call>weather\n```json\n{"city": "Rom {}"}\n```\n</tool_call>\n<tool_call>time\n'
     "```json\n{}\n```\n</tool_call>\n</tool_calls>", [WEATHER, TIME]),
]  # fmt: skip


def joined(found: Found) -> Found:
    """Merge neighbouring texts."""
    result: Found = []
    for part in found:
        if isinstance(part, str) and result and isinstance(result[-1], str):
            result[-1] += part
        else:
            result.append(part)
    return result


@pytest.mark.parametrize(("parser", "text", "expected"), CASES, ids=[f"{p}-{i}" for i, (p, _, _) in enumerate(CASES)])
def test_calls_are_found_however_the_text_is_cut(parser: str, text: str, expected: Found) -> None:
    for size in (1, 3, 10_000):
        reader = make_parser(parser, {"weather": {"properties": {"city": {"type": "string"}}}, "time": {}})
        found = [part for start in range(0, len(text), size) for part in reader.push(text[start : start + size])]
        assert joined([*found, *reader.flush()]) == expected, f"in parts of {size} characters"


@pytest.mark.parametrize(("parser", "text", "expected"), CASES, ids=[f"{p}-{i}" for i, (p, _, _) in enumerate(CASES)])
def test_what_is_held_back_is_known(parser: str, text: str, expected: Found) -> None:
    """A stream that is resumed there would skip it."""
    for size in range(1, len(text)):
        reader = make_parser(parser, {"weather": {}, "time": {}})
        reader.push(text[:size])
        assert reader.is_holding or not reader.flush(), text[:size]


@pytest.mark.parametrize("parser", [*sorted(set(TOOL_PARSERS) - {"auto"}), "llama3f"])
def test_text_that_is_no_call_is_not_held_back(parser: str) -> None:
    reader = make_parser(parser, {"weather": {}, "time": {}})
    for word in ("It", " rains", " in", " Rome."):
        assert reader.push(word) == [word]
        assert not reader.is_holding


@pytest.mark.parametrize("begun", ["[TOOL_CALLS]time{}", "[TOOL_CALLS]"])
def test_long_text_behind_a_mark_is_not_held_back_for_ever(begun: str) -> None:
    reader, text = make_parser("mistral"), "It rains. " * 200
    found = [part for word in (begun, *text.split(" ")) for part in reader.push(word)]
    assert "rains" in str(found)
    assert not reader.is_holding


def test_bare_call_of_a_tool_without_a_schema_is_found() -> None:
    parser = make_parser("qwen3_coder")
    assert [*parser.push("<function=time></function>"), *parser.flush()] == [TIME]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "number"}, 5),
        ("5", {"type": ["string", "null"]}, "5"),
        ("5", {"type": ["number", "string"]}, 5),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("5", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "5"),
        ("5", {"anyOf": [{"type": "string"}, {}]}, 5),
        ("True", {"type": "boolean"}, True),
        ("long", {"type": "integer"}, "long"),
        ('{"a": 1}', {"$ref": "#/$defs/A"}, {"a": 1}),
        ('"a"', {"type": "string"}, '"a"'),
        ('"a"', {"type": "array"}, "a"),
        ("a", {"enum": ["a", "b"]}, "a"),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"const": 1}, 1),
        ("1", {"$ref": "#/nowhere"}, 1),
        ("1", {"$ref": "#/$defs/B"}, "1"),
        ("1", {"$ref": "#/properties/x"}, 1),
        ("[1]", {}, [1]),
        ('"a"', {}, '"a"'),
    ],
)
def test_type_of_an_argument_without_quotes_is_that_of_the_schema(text: str, schema: Any, value: Any) -> None:
    root = {"properties": {"x": schema}, "$defs": {"A": {"type": "object"}, "B": {"type": "string"}}}
    assert value_of(text, root, "x") == value


DEEP = '{"name": "f", "arguments": ' + '{"a":' * 100_000


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", f"<tool_call>{DEEP}</tool_call>"),
        ("llama3_json", DEEP),
        ("mistral", f"[TOOL_CALLS][{DEEP}"),
        ("mistral", f"[TOOL_CALLS]f{DEEP}"),
        ("required", f"[{DEEP}" + "}" * 100_001),
        ("lfm2", "<|tool_call_start|>[f(a=" + "[" * 100_000 + "]" * 100_000 + ")]"),
    ],
)
def test_too_deeply_nested_call_is_text(parser: str, text: str) -> None:
    reader = make_parser(parser)
    assert reader.push(text) + reader.flush() == [text]


def test_too_deeply_nested_arguments_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"a": schema}
    with pytest.raises(ApiError, match="tools is nested too deep") as caught:
        json_text(schema, "tools")
    assert (caught.value.http_status, caught.value.param) == (400, "tools")


def test_list_of_calls_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr("triptych.launch.gateway.tools.forced.json.loads", lambda text: sizes.append(len(text)))
    parser = make_parser("required")
    for _ in range(1000):
        parser.push('[{"name": "f", "arguments": {"a": "}{\\"}')
    assert not sizes


def test_each_format_can_be_chosen_by_name() -> None:
    named = set(TOOL_PARSERS) - {"auto", "none"}
    assert named == {parser for parser, *_ in CASES} - {"llama3f", "none", "required", "named:time"} | {"harmony"}
    assert not [name for name in named if isinstance(make_parser(name), PlainText)]


@pytest.mark.parametrize(("theirs", "own"), [*PARSERS_OF_VLLM.items(), *PARSERS_OF_SGLANG.items()])
def test_names_of_vllm_and_sglang_are_accepted(theirs: str, own: str) -> None:
    assert find_parser(GatewayConfig(tool_parser=theirs).tool_parser, "") == own in TOOL_PARSERS


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("... <tool_call> ...", "hermes"),
        (r"<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1", "qwen3_coder"),
        ('<|python_tag|> <function=example_function_name>{"example_name": "example_value"}</function>', "llama3_json"),
        ("<tool_call>{function-name}<arg_key>", "glm45"),
        (r"<seed:tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", "seed_oss"),
        ("{% if tools %}[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ('{{- \'{"name": function name, "parameters": dictionary of argument name and its value}.\' }}', "llama3_json"),
        ('{"name": "{{ tool.name }}", "description": "", "parameters": {{ tool.parameters }}}', "none"),  # Command R's
        ("{{ messages }}", "none"),
        ('{{ tools }} <minimax:tool_call>\n<invoke name="tool-name-1">', "minimax"),
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        ('{{ "List of tools: [" }}', "lfm2"),
        ("<|tool_call_start|>\n```python\n", "lfm2"),
        ("wrapped in <function_calls></function_calls> XML tags", "olmo3"),
        ("respond only with <|tool_call|> followed by a JSON list of tools used", "granite"),
        ("formatted as functools[{", "granite"),
        ("{% if 'tools' in message %}<|tool|>{{ message['tools'] }}", "granite"),
        ("<|START_ACTION|>[", "cohere"),
        ("<TOOLCALL>[{{", "nemotron"),
        ("<|tools_prefix|>", "apertus"),
        ("'<start_function_call>call:'", "gemma"),
        ("<|action_start|><|plugin|>", "internlm"),
        ("first print <tool_calls> ... <tool_call>function_name\n```json", "hunyuan"),
        ('<tool_calls>[{"name": "func_name1"', "jamba"),
        ("{% for tool in tools %} <｜tool▁calls▁begin｜>", "deepseek"),
        ("{% for tool in message['tool_calls'] %}<｜tool▁calls▁begin｜>", "none"),  # the model is not told its tools
        ('in a single JSON array: [{"name": "tool_call_name"', "xlam"),
        ("Use exact format: [func_name1(param1=value1)]", "pythonic"),
    ],
)
def test_parser_is_detected_from_the_template(template: str, parser: str) -> None:
    assert find_parser("auto", template) == parser
    assert find_parser("mistral", template) == "mistral"
