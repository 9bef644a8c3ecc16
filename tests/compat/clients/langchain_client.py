"""langchain-openai as a client: ``python langchain_client.py http://127.0.0.1:8000 [model]``, for the model demo."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Any

import openai
from checks import ANSWER, PERSON, QUESTION, WEATHER, raises, run
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


class GetWeather(BaseModel):
    """The weather in a city."""

    days: int = Field(ge=1, le=9)


def chat_model(where: dict[str, Any], **more: Any) -> ChatOpenAI:
    return ChatOpenAI(**{"temperature": 0, "max_retries": 0, **where, **more})


def invoke(where: dict[str, Any]) -> None:
    reply = chat_model(where).invoke(QUESTION)
    assert reply.content == ANSWER
    assert reply.usage_metadata is not None
    assert reply.usage_metadata["input_tokens"] > 0
    history = [SystemMessage("Be brief."), HumanMessage(QUESTION), AIMessage(ANSWER), HumanMessage(QUESTION)]
    assert chat_model(where, max_tokens=20).invoke(history).content


def stream(where: dict[str, Any]) -> None:
    chunks = list(chat_model(where, stream_usage=True).stream(QUESTION))
    assert "".join(str(chunk.content) for chunk in chunks) == ANSWER
    assert any(chunk.usage_metadata for chunk in chunks)


def asynchronous(where: dict[str, Any]) -> None:
    async def everyone() -> list[Any]:
        return await chat_model(where).abatch([QUESTION] * 8)

    assert [reply.content for reply in asyncio.run(everyone())] == [ANSWER] * 8


def completion_model(where: dict[str, Any]) -> None:
    model = OpenAI(temperature=0, max_retries=0, max_tokens=30, **where)
    prompt = f"<|user|>{QUESTION}<|end|><|assistant|>"
    assert model.invoke(prompt) == ANSWER
    assert "".join(model.stream(prompt)) == ANSWER


def logprobs(where: dict[str, Any]) -> None:
    reply = chat_model(where, logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert len(reply.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


def structured_output(where: dict[str, Any]) -> None:
    model = chat_model(where, max_tokens=80)
    for method in ("json_schema", "function_calling"):
        person = model.with_structured_output(Person, method=method).invoke(QUESTION)
        assert isinstance(person, Person), method
    assert set(model.with_structured_output({"title": "person", **PERSON}).invoke(QUESTION)) == {"name", "age"}


def tools(where: dict[str, Any]) -> None:
    model = chat_model(where, max_tokens=200).bind_tools([GetWeather], tool_choice="any", parallel_tool_calls=False)
    [call] = model.invoke(QUESTION).tool_calls
    assert call["name"] == "GetWeather"
    gathered: Any = None
    for chunk in model.stream(QUESTION):
        gathered = chunk if gathered is None else gathered + chunk
    assert [call["name"] for call in gathered.tool_calls] == ["GetWeather"]
    named = chat_model(where, max_tokens=200).bind_tools(
        [{"type": "function", "function": WEATHER}], tool_choice="get_weather"
    )
    assert named.invoke(QUESTION).tool_calls[0]["args"]["city"] in ("Rome", "Oslo")


def responses(where: dict[str, Any]) -> None:
    model = chat_model(where, use_responses_api=True, max_tokens=80)
    assert model.invoke(QUESTION).text == ANSWER
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == ANSWER
    assert isinstance(model.with_structured_output(Person).invoke(QUESTION), Person)


def embeddings(where: dict[str, Any]) -> None:
    model = OpenAIEmbeddings(check_embedding_ctx_length=False, max_retries=0, **where)
    assert model.embed_documents(["a", "b"])[0] == model.embed_query("a")


def errors(where: dict[str, Any]) -> None:
    raises(openai.NotFoundError, lambda: chat_model({**where, "model": "gpt-unknown"}).invoke(QUESTION))
    raises(openai.BadRequestError, lambda: chat_model(where).invoke("word " * 5000))
    raises(openai.BadRequestError, lambda: chat_model(where, temperature=-3).invoke(QUESTION))


CHECKS = [
    invoke,
    stream,
    asynchronous,
    completion_model,
    logprobs,
    structured_output,
    tools,
    responses,
    embeddings,
    errors,
]

if __name__ == "__main__":
    url, model = [*sys.argv[1:], "demo"][:2]
    run(
        f"langchain-openai {version('langchain-openai')} with openai {openai.__version__}", CHECKS,
        {"base_url": f"{url}/v1", "api_key": "none", "model": model},
    )  # fmt: skip
