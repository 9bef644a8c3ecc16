"""The official Python client (2.x and 3.x): ``python openai_client.py http://127.0.0.1:8000 [model]``, model demo."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import openai
from checks import ANSWER, MESSAGES, QUESTION, WEATHER, raises, run
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel, Field

PROMPT = f"<|user|>{QUESTION}<|end|><|assistant|>"
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
NUM_CONCURRENT = 32


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


class GetWeather(BaseModel):
    """The weather in a city."""

    days: int = Field(ge=1, le=9)


def strictly(kind: type[Any], value: Any) -> None:
    """Validate with the client's models: the client itself accepts almost anything."""
    kind.model_validate_json(value.model_dump_json(by_alias=True), strict=True)


def models(client: OpenAI, model: str) -> None:
    assert model in [one.id for one in client.models.list()]
    assert client.models.retrieve(model).id == model
    raises(openai.NotFoundError, lambda: client.models.retrieve("other"))


def chat(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0)
    assert reply.choices[0].message.content == ANSWER
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    strictly(ChatCompletion, reply)


def chat_parts_and_usual_fields(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
        temperature=0, top_p=1, n=2, seed=7, stop=["container"], max_completion_tokens=30, presence_penalty=0,
        frequency_penalty=0, logit_bias={"5": -1}, user="me", store=False, metadata={"a": "b"}, service_tier="auto",
        modalities=["text"], verbosity="medium",
    )  # fmt: skip
    assert [choice.message.content for choice in reply.choices] == ["Return the number of items in a "] * 2


def chat_of_several_turns(client: OpenAI, model: str) -> None:
    first = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0)
    again = client.chat.completions.create(
        model=model, messages=[*MESSAGES, first.choices[0].message, *MESSAGES], temperature=0, max_tokens=20
    )
    assert again.choices[0].message.content


def chat_streamed(client: OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert [chunk.usage is not None for chunk in chunks[-2:]] == [False, True]
    assert chunks[0].choices[0].delta.role == "assistant"
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk)


def chat_stream_helper(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=MESSAGES, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        assert stream.get_final_completion().choices[0].message.content == "".join(deltas) == ANSWER


def raw_and_streaming_response(client: OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(model=model, messages=MESSAGES, temperature=0)
    assert raw.headers["x-request-id"]
    assert raw.parse()._request_id == raw.headers["x-request-id"]
    with client.chat.completions.with_streaming_response.create(model=model, messages=MESSAGES, stream=True) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def logprobs(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=3)
    entries = reply.choices[0].logprobs
    assert entries is not None
    assert entries.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in entries.content).decode().startswith(ANSWER)
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries.content)
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=3
    ) as stream:
        assert any(event.type == "logprobs.content.delta" for event in stream)
        streamed = stream.get_final_completion().choices[0].logprobs
    assert streamed is not None
    assert [entry.token for entry in streamed.content or []] == [entry.token for entry in entries.content]


def completions(client: OpenAI, model: str) -> None:
    reply = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=30, logprobs=2)
    assert reply.choices[0].text == ANSWER
    assert reply.choices[0].logprobs is not None
    strictly(Completion, reply)
    several = client.completions.create(model=model, prompt=[PROMPT, "a"], n=2, best_of=3, max_tokens=5, suffix=None)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    echoed = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=30, echo=True)
    assert echoed.choices[0].text == PROMPT + ANSWER
    stream = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=30, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == ANSWER


def structured_outputs(client: OpenAI, model: str) -> None:
    parsed = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Person, max_tokens=80, temperature=0
    )
    person = parsed.choices[0].message.parsed
    assert isinstance(person, Person)
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, response_format=Person, max_tokens=80, temperature=0
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == person
    response = client.responses.parse(
        model=model, input=QUESTION, text_format=Person, max_output_tokens=80, temperature=0
    )
    assert response.output_parsed == person


def structured_output_that_is_cut(client: OpenAI, model: str) -> None:
    raises(
        openai.LengthFinishReasonError,
        lambda: client.chat.completions.parse(model=model, messages=MESSAGES, response_format=Person, max_tokens=2),
    )


def bad_schema(client: OpenAI, model: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    error = raises(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=model, messages=MESSAGES, response_format=form),
    )
    assert error.param.startswith("response_format")


def tools(client: OpenAI, model: str) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        asked: Any = {"model": model, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
        reply = client.chat.completions.create(**asked, parallel_tool_calls=False)
        assert reply.choices[0].finish_reason in ("tool_calls", "stop")
        [call] = reply.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "get_weather"
        with client.chat.completions.stream(**asked, parallel_tool_calls=False) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
        assert [call.function.name for call in message.tool_calls or []] == ["get_weather"]


def tools_by_pydantic(client: OpenAI, model: str) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    reply = client.chat.completions.parse(
        model=model, messages=MESSAGES, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=200
    )
    [call] = reply.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


def tools_left_alone(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model, messages=MESSAGES, tools=TOOLS, tool_choice="none", temperature=0
    )
    assert reply.choices[0].message.content == ANSWER
    assert not reply.choices[0].message.tool_calls


def responses(client: OpenAI, model: str) -> None:
    reply = client.responses.create(model=model, input=QUESTION, temperature=0, store=False, max_output_tokens=40)
    assert (reply.output_text, reply.status) == (ANSWER, "completed")
    strictly(Response, reply)
    cut = client.responses.create(model=model, input=QUESTION, temperature=0, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with client.responses.stream(model=model, input=QUESTION, temperature=0) as stream:
        events = list(stream)
        names = [event.type for event in events]
        assert (names[:2], names[-1]) == (["response.created", "response.in_progress"], "response.completed")
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(deltas) == ANSWER
    again = client.responses.create(
        model=model, input=[*MESSAGES, *reply.output, *MESSAGES], instructions="Be brief.", max_output_tokens=20
    )
    assert again.status in ("completed", "incomplete")


def responses_with_tools(client: OpenAI, model: str) -> None:
    tool: Any = {"type": "function", "strict": True, **WEATHER}
    asked: Any = {"model": model, "input": QUESTION, "tools": [tool], "tool_choice": "required",
                  "parallel_tool_calls": False, "max_output_tokens": 200}  # fmt: skip
    reply = client.responses.create(**asked)
    assert [item.type for item in reply.output] == ["function_call"]
    assert (reply.tool_choice, reply.parallel_tool_calls) == ("required", False)
    with client.responses.stream(**asked) as stream:
        names = [event.type for event in stream]
        assert stream.get_final_response().output[0].type == "function_call"
    assert "response.function_call_arguments.done" in names


def responses_with_logprobs(client: OpenAI, model: str) -> None:
    reply = client.responses.create(
        model=model, input=QUESTION, temperature=0, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    assert reply.top_logprobs == 2
    content = reply.output[0].content[0]  # type: ignore[union-attr]
    assert all(len(entry.top_logprobs) == 2 for entry in content.logprobs)
    with client.responses.stream(
        model=model, input=QUESTION, temperature=0, top_logprobs=2, include=["message.output_text.logprobs"]
    ) as stream:
        for _ in stream:
            pass
        final: Any = stream.get_final_response().output[0]
    assert len(final.content[0].logprobs) == len(content.logprobs)


def embeddings(client: OpenAI, model: str) -> None:
    reply = client.embeddings.create(model=model, input=["a", "b"])
    plain = client.embeddings.create(model=model, input=["a", "b"], encoding_format="float")
    assert [row.embedding for row in reply.data] == [row.embedding for row in plain.data]
    assert len(client.embeddings.create(model=model, input="a", dimensions=8).data[0].embedding) == 8


def absent_routes(client: OpenAI, model: str) -> None:
    for call in (
        lambda: client.images.generate(model=model, prompt="a"),
        lambda: client.moderations.create(model=model, input="a"),
        lambda: client.files.list(),
        lambda: client.responses.retrieve("resp_x"),
    ):
        error = raises(openai.NotFoundError, call)
        assert error.type == "invalid_request_error", error.body
        assert error.code == "unknown_route", error.body


def refusals(client: OpenAI, model: str) -> None:
    def create(**more: Any) -> Any:
        return client.chat.completions.create(**{"model": model, "messages": MESSAGES, **more})

    error = raises(openai.BadRequestError, lambda: create(messages=[{"role": "user", "content": "word " * 5000}]))
    assert error.code == "context_length_exceeded"
    error = raises(openai.NotFoundError, lambda: create(model="gpt-unknown"))
    assert (error.code, error.param) == ("model_not_found", "model")
    for wrong in ({"temperature": -3}, {"top_logprobs": 2}, {"messages": []}, {"extra_body": {"nonsense": 1}},
                  {"stop": ["x"] * 1000}, {"n": 0}, {"max_tokens": -1}, {"logit_bias": {"x": 1}},
                  {"tool_choice": "required"}, {"stream": True, "temperature": -3}):  # fmt: skip
        error = raises(openai.BadRequestError, lambda: create(**wrong))  # noqa: B023 - called at once
        assert error.type == "invalid_request_error"
        assert error.param


def timeout(client: OpenAI, model: str) -> None:
    impatient = client.with_options(timeout=0.2, max_retries=0)
    endless: Any = {"extra_body": {"ignore_eos": True}, "max_tokens": 900}
    raises(openai.APITimeoutError, lambda: impatient.chat.completions.create(model=model, messages=MESSAGES, **endless))
    chat(client, model)


def cancellation(client: OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, max_tokens=900, extra_body={"ignore_eos": True}
    )
    for number, _ in enumerate(stream):
        if number == 3:
            stream.close()
            break
    asyncio.run(_cancel(client, model))
    chat(client, model)


async def _cancel(client: OpenAI, model: str) -> None:
    async with AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as other:
        task = asyncio.create_task(
            other.chat.completions.create(
                model=model, messages=MESSAGES, max_tokens=900, extra_body={"ignore_eos": True}
            )
        )
        done, _ = await asyncio.wait([task], timeout=0.1)
        assert not done
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


def concurrent_streams(client: OpenAI, model: str) -> None:
    async def one(other: AsyncOpenAI) -> str:
        stream = await other.chat.completions.create(model=model, messages=MESSAGES, temperature=0, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def everyone() -> list[str]:
        async with AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as other:
            return await asyncio.gather(*[one(other) for _ in range(NUM_CONCURRENT)])

    assert asyncio.run(everyone()) == [ANSWER] * NUM_CONCURRENT


def threads(client: OpenAI, model: str) -> None:
    answers: list[str | None] = []

    def one() -> None:
        reply = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0)
        answers.append(reply.choices[0].message.content)

    workers = [threading.Thread(target=one) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert answers == [ANSWER] * 8


CHECKS = [
    models, chat, chat_parts_and_usual_fields, chat_of_several_turns, chat_streamed, chat_stream_helper,
    raw_and_streaming_response, logprobs, completions, structured_outputs, structured_output_that_is_cut, bad_schema,
    tools, tools_by_pydantic, tools_left_alone, responses, responses_with_tools, responses_with_logprobs,
    embeddings, absent_routes, refusals, timeout, cancellation, concurrent_streams, threads,
]  # fmt: skip


if __name__ == "__main__":
    url, model = [*sys.argv[1:], "demo"][:2]
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        run(f"openai {openai.__version__}", CHECKS, client, model)
