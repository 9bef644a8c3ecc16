"""Impossible fields are refused with their name; fields that request nothing are accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from tests.launch.gateway.conftest import Site
from triptych.launch.gateway.schemas.chat import ChatRequest

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "hi"}]
BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 1},
    CHAT: {"messages": MESSAGES, "max_tokens": 1},
    RESPONSES: {"input": "hi", "max_output_tokens": 1},
}

TOOLS = [{"type": "function", "function": {"name": "f"}}]
FLAT = [{"type": "function", "name": "f"}]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"max_toks": 1}, "max_toks"),
    (COMPLETIONS, {"max-tokens": 1}, "max-tokens"),
    (COMPLETIONS, {"Temperature": 1}, "Temperature"),
    (COMPLETIONS, {"list": 1}, "list"),
    (COMPLETIONS, {"query": "hi"}, "query"),
    (CHAT, {"messages": [{"role": "user", "content": "hi", "Name": "me"}]}, "messages[0].Name"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"temperature": -1}, "temperature"),
    (COMPLETIONS, {"temperature": True}, "temperature"),
    (COMPLETIONS, {"top_p": 1.5}, "top_p"),
    (COMPLETIONS, {"max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"n": 0}, "n"),
    (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
    (COMPLETIONS, {"suffix": "tail"}, "suffix"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [999999]}, "prompt"),
    (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"5": 101}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
    (COMPLETIONS, {"structured_outputs": {"json": "[" * 10_000}}, "structured_outputs.json"),
    (COMPLETIONS, {"structured_outputs": {"json": "[1]"}}, "structured_outputs.json"),
    (COMPLETIONS, {"stop": ["x"] * 17}, "stop"),
    (COMPLETIONS, {"stop_token_ids": [10**6]}, "stop_token_ids"),
    (COMPLETIONS, {"min_tokens": 2, "max_tokens": 1}, "min_tokens"),
    (COMPLETIONS, {"echo": True, "logprobs": 1, "stream": True}, "logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs"),
    (RESPONSES, {"prompt_logprobs": 1}, "prompt_logprobs"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
    (COMPLETIONS, {"priority": 5000}, "priority"),
    (COMPLETIONS, {"deadline_ms": 0}, "deadline_ms"),
    (COMPLETIONS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"truncate_prompt_tokens": 2**31}, "truncate_prompt_tokens"),
    (RESPONSES, {"include": ["everything"]}, "include[0]"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "x", "name": ""}]}, "input[0].name"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    (COMPLETIONS, {"seed": 2**63}, "seed"),
    (COMPLETIONS, {"seed": -(2**63) - 1}, "seed"),
    (COMPLETIONS, {"request_id": "a b"}, "request_id"),
    (COMPLETIONS, {"n": 65}, "n"),
    (COMPLETIONS, {"n": 64}, "n"),  # more than may be live at once
    (COMPLETIONS, {"resumable": True, "prompt": ["a", "b"]}, "resumable"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].image_url"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tools": [{"type": "code"}]}, "tools[0].type"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    (RESPONSES, {"tools": [{"type": "file_search", "vector_store_ids": ["a"]}]}, "tools[0].type"),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom", "name": "b"}]}]},
     "tools[0].tools[0].type"),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "a" * 64, "tools": [{"type": "function", "name": "b" * 64}]}]},
     "tools[0]"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "a"}]}]},
     "input[0].content[0].type"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"resumable": True}, "resumable"),
    (RESPONSES, {"n": 2}, "n"),
    (COMPLETIONS, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"response_format": {"type": "json_schema", "schema": {}}}, "response_format.schema"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
     "response_format"),
    (COMPLETIONS, {"structured_outputs": {}}, "structured_outputs"),
    (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "structured_outputs"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}},
     "text.format"),
    (CHAT, {"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "nonsense"}}}}, "response_format"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}],
            "tool_choice": "required"}, "tools"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}}}, "tool_choice"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
     "tool_choice.allowed_tools.tools"),
    (RESPONSES, {"tools": FLAT, "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
    (RESPONSES, {"tools": FLAT, "tool_choice": {"type": "function"}}, "tool_choice.name"),
    (RESPONSES, {"input": [{"type": "message", "content": "hi"}]}, "input[0]"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    (RESPONSES, {"max_output_tokens": -5}, "max_output_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "field", "param"), WRONG, ids=[f"{p[4:]} {f}" for p, f, _ in WRONG])
def test_wrong_field_is_named(api: Site, path: str, field: dict[str, Any], param: str) -> None:
    status, error = api.refusal(path, **{**BASE[path], **field})
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "field", "told"),
    [
        (COMPLETIONS, {"max_toks": 1}, "unknown field 'max_toks'; did you mean max_tokens?"),
        (COMPLETIONS, {"temperature": "hot", "max_toks": 1}, "unknown field 'max_toks'; did you mean max_tokens?"),
        (CHAT, {"messages": [{**MESSAGES[0], "nme": "me"}]}, "unknown field 'nme'; did you mean name?"),
        (CHAT, {"query": "hi"}, "unknown field 'query'"),
        (CHAT, {"enable_thinking": False}, "unknown field 'enable_thinking'; use chat_template_kwargs"),
        (COMPLETIONS, {"enable_thinking": False}, "unknown field 'enable_thinking'"),
        (COMPLETIONS, {"n_predict": 5}, "unknown field 'n_predict'; use max_tokens"),
        (CHAT, {"random_seed": 5}, "unknown field 'random_seed'; use seed"),
        (EMBEDDINGS, {"input_type": "query"}, "unknown field 'input_type'; use prompt_name"),
        (COMPLETIONS, {"temp": 0.5}, "unknown field 'temp'; use temperature"),
        (COMPLETIONS, {"content": "hi"}, "unknown field 'content'; use prompt"),
        (CHAT, {"options": {"temperature": 0}}, "unknown field 'options'; its entries belong into the request itself"),
        (COMPLETIONS, {"timings_per_token": True}, "unknown field 'timings_per_token'"),
        (COMPLETIONS, {"guided_regex": "a+"}, "guided_regex is 'a+', which is not supported: use structured_outputs"),
        (CHAT, {"bad_words": ["no"]},
         "bad_words is ['no'], which is not supported: use a logit_bias of -100 for words of one token"),
        (CHAT, {"allowed_token_ids": [5]},
         "allowed_token_ids is [5], which is not supported: use structured_outputs, or a logit_bias of 100 for each of"
         " them"),
        (CHAT, {"chat_template": "x"}, "chat_template is 'x', which is not supported: use chat_template_kwargs"),
    ],
    ids=str,
)  # fmt: skip
def test_refusal_of_a_field_says_what_was_probably_meant(
    api: Site, path: str, field: dict[str, Any], told: str
) -> None:
    _, error = api.refusal(path, **{**BASE.get(path, {}), **field})
    assert error["message"] == told


def test_refusal_of_a_long_name_is_short(api: Site) -> None:
    """Once in full in the message and once in the param, the reply would be twice as long as the body."""
    _, error = api.refusal(CHAT, messages=MESSAGES, **{"q" * 100_000: 1})
    assert (error["message"], error["param"]) == ("unknown field '" + "q" * 79, "q" * 80)


def test_refusal_of_a_stored_item_says_what_to_do(api: Site) -> None:
    """Vercel's AI SDK refers to the items of earlier steps, unless it is told that they are not stored."""
    _, error = api.refusal(RESPONSES, input=[{"type": "item_reference", "id": "msg_1"}])
    assert "nothing is stored here: send the item itself, as clients do for store: false" in error["message"]


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_refusal_of_a_stored_conversation_says_what_to_do(api: Site, field: str) -> None:
    _, error = api.refusal(RESPONSES, input="hi", **{field: "resp_1"})
    assert error["message"].endswith("not supported: nothing is stored here, send the whole conversation")


NEUTRAL: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        "suffix": None, "echo": False, "best_of": 1, "use_beam_search": False, "user": "me", "presence_penalty": 0,
        "length_penalty": 1.0, "add_special_tokens": True, "guided_json": None, "lora_path": None, "top_k": -1,
        "stream": False, "stream_options": None, "logit_bias": {}, "stop": [], "no_stop_trim": False,
    },
    CHAT: {
        "store": False, "metadata": {}, "service_tier": "auto", "modalities": ["text"], "parallel_tool_calls": True,
        "tool_choice": None, "tools": None, "response_format": {"type": "text"}, "function_call": None,
        "functions": None, "separate_reasoning": True, "stream_reasoning": True, "n": 1, "logprobs": False,
        "reasoning_effort": None, "prediction": None, "audio": None, "web_search_options": None, "top_logprobs": None,
        "continue_final_message": False, "return_hidden_states": False, "session_params": None, "rid": "abc",
        "frequency_penalty": 0.0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False, "regex": None,
    },
    RESPONSES: {
        "store": True, "truncation": "disabled", "include": None, "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},  # as a reply spells it
        "client_metadata": {"thread_id": "a"},  # from Codex
        "background": False, "metadata": {"a": "b"}, "tool_choice": "auto", "text": {"format": {"type": "text"}},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, fields in NEUTRAL.items() for name in fields], ids=str
)
def test_field_with_a_neutral_value_is_accepted(api: Site, path: str, name: str) -> None:
    api.ask(path, **{**BASE[path], name: NEUTRAL[path][name]})


@pytest.mark.parametrize("path", BASE)
def test_all_neutral_fields_and_nulls_together_are_accepted(api: Site, path: str) -> None:
    nulls = dict.fromkeys(["temperature", "top_p", "seed", "stop", "n", "user", "max_completion_tokens"][:6])
    api.ask(path, **{**BASE[path], **NEUTRAL[path], **nulls})


@pytest.mark.parametrize("path", BASE)
def test_integer_may_be_written_as_a_float(api: Site, path: str) -> None:
    """As Lua does, and Python if a number comes from pandas or a YAML file."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    usage = api.ask(path, **{**BASE[path], limit: 3.0}, seed=7.0, top_k=5e1, temperature=1, ignore_eos=True)["usage"]
    assert 3 in (usage.get("completion_tokens"), usage.get("output_tokens"))


def test_unknown_model_is_a_404(api: Site) -> None:
    status, error = api.refusal(CHAT, messages=MESSAGES, model="gpt-9")
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("path", "param", "more"),
    [
        (CHAT, "messages", {}),
        (RESPONSES, "input", {}),
        ("/v1/messages", "messages", {"max_tokens": 5}),
        ("/tokenize", "messages", {}),
    ],
)
def test_too_long_chat_is_refused_with_the_field_that_was_sent(
    api: Site, path: str, param: str, more: dict[str, Any]
) -> None:
    status, error = api.refusal(path, **{param: [{"role": "user", "content": "a" * 5000}]}, **more)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)


def test_too_long_prompt_is_refused_in_openai_s_words(api: Site) -> None:
    status, error = api.refusal(COMPLETIONS, prompt=[5] * 5000)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is" in error["message"], "litellm and others recognise the case by these words"
    assert "5000" in error["message"]
    assert "4095" in error["message"]


def test_too_long_message_is_refused_in_anthropic_s_words(api: Site) -> None:
    """Agents that shorten old conversations recognise the case by these words."""
    _, error = api.refusal("/v1/messages", messages=[{"role": "user", "content": "a" * 5000}], max_tokens=5)
    assert error["message"].startswith("prompt is too long: prompt has 50")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_non_text_parts_are_known_but_not_supported(api: Site, kind: str) -> None:
    status, error = api.refusal(CHAT, messages=[{"role": "user", "content": [{"type": kind, kind: {"url": "x"}}]}])
    assert (status, error["code"], error["param"]) == (400, "unsupported_value", f"messages[0].content[0].{kind}")


def test_text_part_may_repeat_the_fields_of_its_reply(api: Site) -> None:
    """As OpenAI's agents for JavaScript send the turns of the assistant in chats."""
    reply = api.ask(CHAT, messages=MESSAGES, max_tokens=1)["choices"][0]["message"]
    part = {"type": "text", "text": reply.pop("content"), **reply, "tool_calls": [], "reasoning": "a"}
    api.ask(CHAT, messages=[*MESSAGES, {"role": "assistant", "content": [part]}, *MESSAGES], max_tokens=1)


HALF = "\ud800"  # of a surrogate pair, as JSON can spell it
HALVES: list[tuple[str, dict[str, Any], str | None]] = [
    (RESPONSES, {"metadata": {"a": HALF}}, "metadata"),
    (RESPONSES, {"metadata": {HALF: "a"}}, "metadata"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": HALF, "schema": {}}}}, "text.format.name"),
    (COMPLETIONS, {"prompt": HALF}, "prompt"),
    (COMPLETIONS, {"stop": ["a", HALF]}, "stop"),
    (COMPLETIONS, {HALF: 1}, None),
    (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": HALF}]}, "messages[1].content"),
    (CHAT, {"chat_template_kwargs": {"a": [{"b": HALF}]}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"a": [1, HALF]}}, "chat_template_kwargs"),
    ("/tokenize", {"prompt": HALF}, "prompt"),
    ("/v1/decisions", {"state": "s", "questions": [{"question": "q", "options": ["a", HALF]}]}, "questions[0].options"),
]


@pytest.mark.parametrize(("path", "field", "param"), HALVES, ids=[f"{p[4:]} {f!a}" for p, f, _ in HALVES])
def test_lone_surrogate_is_refused_with_its_field(
    api: Site, path: str, field: dict[str, Any], param: str | None
) -> None:
    """No reply can contain it: the answer would be lost after the model has generated it."""
    body = json.dumps({**BASE.get(path, {}), **field}).encode()
    reply = api.http.post(path, content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_deeply_nested_field_is_checked() -> None:
    deep: list[Any] = [HALF]
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValidationError, match="a lone surrogate"):
        ChatRequest.model_validate({"messages": MESSAGES, "chat_template_kwargs": {"a": deep}})


def test_refused_request_leaves_nothing(api: Site) -> None:
    from tests.pipeline.checks import assert_quiet

    api.refusal(COMPLETIONS, prompt=[[1, 2], [999999]], n=2)
    assert api.driver is not None
    assert_quiet(api.driver)
