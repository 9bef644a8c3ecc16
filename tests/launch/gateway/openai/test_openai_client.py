"""The official Python client; its data models check what it receives.

What most of its users do is in ``tests/compat/clients/openai_client.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import CreateEmbeddingResponse, Decision
from openai.types import completion_create_params as of_completions
from openai.types import embedding_create_params as of_embeddings
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as of_chats
from openai.types.responses import FunctionToolParam, InputTokenCountParams, InputTokenCountResponse, Response
from openai.types.responses import response_create_params as of_responses
from openai.types.shared_params import Reasoning

from tests.launch.gateway.conftest import Site, site
from triptych import Driver
from triptych.launch.gateway.schemas.base import ApiModel
from triptych.launch.gateway.schemas.chat import ChatRequest
from triptych.launch.gateway.schemas.completions import CompletionRequest
from triptych.launch.gateway.schemas.embeddings import EmbeddingRequest
from triptych.launch.gateway.schemas.responses import (
    FunctionTool,
    InputTokensRequest,
    ReasoningOptions,
    ResponseRequest,
)

LEN: list[Any] = [{"role": "user", "content": "What does len do?"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
]


@pytest.fixture
def client(demo: Site) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def hash_client(api: Site) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def strictly(model: type[Any], value: Any) -> None:
    """Validate with the client's models: the client itself accepts almost anything."""
    model.model_validate_json(value.model_dump_json(by_alias=True), strict=True)


def test_tools(hash_client: OpenAI) -> None:
    reply = hash_client.chat.completions.create(
        model="hash-lm", messages=LEN, tools=TOOLS, tool_choice="auto", max_tokens=8
    )
    strictly(ChatCompletion, reply)
    called: list[Any] = [
        *LEN,
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    ]  # fmt: skip
    stream = hash_client.chat.completions.create(
        model="hash-lm", messages=called, tools=TOOLS, max_tokens=8, stream=True
    )
    for chunk in stream:
        strictly(ChatCompletionChunk, chunk)


def test_response_repeats_the_request_s_settings(hash_client: OpenAI) -> None:
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "additionalProperties": False}}
    form: Any = {"type": "json_schema", "name": "any", "schema": {"type": "object"}}
    reply = hash_client.responses.create(
        model="hash-lm", input="a", tools=[tool], tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False, max_output_tokens=20, text={"format": form}, metadata={"a": "b"},
    )  # fmt: skip
    strictly(Response, reply)
    asked = reply.model_dump(exclude_none=True, by_alias=True)
    assert asked["tool_choice"] == {"type": "function", "name": "f"}
    assert (asked["parallel_tool_calls"], asked["text"]["format"]) == (False, form)
    assert (asked["metadata"], asked["top_logprobs"]) == ({"a": "b"}, 0)


def test_tokens_of_a_response_are_counted_without_computing_it(client: OpenAI, demo: Site) -> None:
    asked: Any = {"model": "demo", "input": LEN, "instructions": "Be brief.", "tool_choice": "none"}
    count = client.responses.input_tokens.count(**asked, truncation="auto", text={"format": {"type": "text"}})
    strictly(InputTokenCountResponse, count)
    reply = client.responses.create(**asked, max_output_tokens=1)
    assert (count.object, reply.usage and reply.usage.input_tokens) == ("response.input_tokens", count.input_tokens)
    status, error = demo.refusal("/v1/responses/input_tokens", input=[{"role": "user", "content": [{"type": "x"}]}])
    assert (status, error["param"]) == (400, "input[0].content[0].type")


def test_logprobs_of_a_response_are_requested_with_include(client: OpenAI) -> None:
    asked: Any = {"model": "demo", "input": "What does len do?", "temperature": 0,
                  "include": ["message.output_text.logprobs"]}  # fmt: skip
    whole: Any = client.responses.create(**asked, top_logprobs=2).output[0]
    entries = whole.content[0].logprobs
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(entries)
    with client.responses.stream(**asked, top_logprobs=2) as stream:
        deltas = [event for event in stream if event.type == "response.output_text.delta"]
        final: Any = stream.get_final_response().output[0]
    assert [entry.token for delta in deltas for entry in delta.logprobs] == [entry.token for entry in entries]
    assert final.content[0].logprobs == entries
    alone: Any = client.responses.create(**asked).output[0]
    assert [entry.top_logprobs for entry in alone.content[0].logprobs] == [[]] * len(entries)


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}], ids=["base64", "float"])
def test_embeddings(hash_client: OpenAI, encoding: Any) -> None:
    """The client asks for base64 unless it is told not to, and decodes it."""
    reply = hash_client.embeddings.create(model="hash-lm", input=["a", "b"], dimensions=4, **encoding)
    assert [row.index for row in reply.data] == [0, 1]
    assert all(sum(value * value for value in row.embedding) == pytest.approx(1.0) for row in reply.data)
    assert reply.data[0].embedding != reply.data[1].embedding
    strictly(CreateEmbeddingResponse, reply)


def test_decisions(client: OpenAI) -> None:
    reply = client.decisions.create(
        model="demo",
        input="len returns the number of items in a container.",
        questions=[
            {"type": "predicate", "instructions": "Is it about len?"},
            {"type": "choice", "name": "what", "instructions": "What?", "choices": [{"value": "a"}, {"value": True}]},
            {"type": "score", "instructions": "How much?", "levels": [{"label": "little"}, {"label": "much"}]},
        ],
    )
    assert [answer.type for answer in reply.answers] == ["predicate", "choice", "score"]
    strictly(Decision, reply)


@pytest.mark.parametrize(
    ("fields", "model", "required"),
    [
        (of_chats.CompletionCreateParamsStreaming, ChatRequest, {"messages": [{"role": "user", "content": "hi"}]}),
        (of_completions.CompletionCreateParamsStreaming, CompletionRequest, {"prompt": "hi"}),
        (of_embeddings.EmbeddingCreateParams, EmbeddingRequest, {"input": "hi"}),
        (of_responses.ResponseCreateParamsStreaming, ResponseRequest, {"input": "hi"}),
        (InputTokenCountParams, InputTokensRequest, {"input": "hi"}),
        (FunctionToolParam, FunctionTool, {"type": "function", "name": "f"}),
        (Reasoning, ReasoningOptions, {}),
    ],
)
def test_every_field_of_the_client_may_be_null(fields: Any, model: type[ApiModel], required: dict[str, Any]) -> None:
    nulls = dict.fromkeys(fields.__required_keys__ | fields.__optional_keys__)
    model.model_validate({**nulls, **required})


def test_wrong_key_is_an_authentication_error(pipeline: Driver) -> None:
    with site(pipeline.run_dir, api_key="right") as keyed:
        for key, is_right in (("wrong", False), ("right", True)):
            with OpenAI(base_url=f"{keyed.url}/v1", api_key=key, max_retries=0) as other:
                if is_right:
                    assert len(list(other.models.list())) == 1
                else:
                    with pytest.raises(openai.AuthenticationError) as caught:
                        other.models.list()
                    assert caught.value.code == "invalid_api_key"


def test_error_inside_a_stream_is_raised(hash_client: OpenAI) -> None:
    stream = hash_client.chat.completions.create(
        model="hash-lm", messages=LEN, stream=True, extra_body={"deadline_ms": 300, "ignore_eos": True}
    )
    with pytest.raises(openai.APIError, match="deadline"):
        list(stream)


@pytest.mark.parametrize("n", [1, 2])
def test_continuous_usage_is_in_every_chunk(hash_client: OpenAI, n: int) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked: Any = {"model": "hash-lm", "n": n, "max_tokens": 5, "stream": True, "stream_options": options,
                  "extra_body": {"ignore_eos": True}}  # fmt: skip
    for chunks in (
        list(hash_client.chat.completions.create(messages=LEN, **asked)),
        list(hash_client.completions.create(prompt="abc", **asked)),
    ):
        uses = [chunk.usage for chunk in chunks]
        counts = [use.completion_tokens for use in uses if use is not None]
        assert len(counts) == len(chunks)
        assert counts == sorted(counts)
        assert counts[-1] == counts[-2] == 5 * n
        assert len({use.prompt_tokens for use in uses if use is not None}) == 1
