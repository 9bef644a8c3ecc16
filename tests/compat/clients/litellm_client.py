"""litellm as a client: ``python litellm_client.py http://127.0.0.1:8000 [model]``, for the model demo."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.metadata import version
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise importing it downloads prices

import litellm
from checks import ANSWER, MESSAGES, PERSON, QUESTION, WEATHER, raises, run

PROVIDERS = ("openai", "hosted_vllm")
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


def chat(where: dict[str, Any], model: str) -> None:
    for provider in PROVIDERS:
        reply = litellm.completion(model=f"{provider}/{model}", messages=MESSAGES, temperature=0, **where)
        assert reply.choices[0].message.content == ANSWER
        assert reply.usage.prompt_tokens > 0


def chat_streamed(where: dict[str, Any], model: str) -> None:
    for provider in PROVIDERS:
        stream = litellm.completion(
            model=f"{provider}/{model}", messages=MESSAGES, temperature=0, stream=True,
            stream_options={"include_usage": True}, **where,
        )  # fmt: skip
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
        assert litellm.stream_chunk_builder(chunks).choices[0].message.content == ANSWER


def chat_async(where: dict[str, Any], model: str) -> None:
    async def one() -> str:
        reply = await litellm.acompletion(
            model=f"openai/{model}", messages=MESSAGES, temperature=0, stream=True, **where
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in reply])

    async def everyone() -> list[str]:
        return await asyncio.gather(*[one() for _ in range(8)])

    assert asyncio.run(everyone()) == [ANSWER] * 8


def text_completion(where: dict[str, Any], model: str) -> None:
    prompt = f"<|user|>{QUESTION}<|end|><|assistant|>"
    reply = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt=prompt, temperature=0, max_tokens=30, **where
    )
    assert reply.choices[0].text == ANSWER


def logprobs(where: dict[str, Any], model: str) -> None:
    reply = litellm.completion(
        model=f"hosted_vllm/{model}", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2, **where
    )
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2


def structured_output(where: dict[str, Any], model: str) -> None:
    for provider in PROVIDERS:
        reply = litellm.completion(
            model=f"{provider}/{model}", messages=MESSAGES, response_format=FORM, max_tokens=80, **where
        )
        assert '"age"' in reply.choices[0].message.content


def tools(where: dict[str, Any], model: str) -> None:
    for provider in PROVIDERS:
        reply = litellm.completion(
            model=f"{provider}/{model}", messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=200,
            parallel_tool_calls=False, **where,
        )  # fmt: skip
        assert reply.choices[0].message.tool_calls[0].function.name == "get_weather"


def responses(where: dict[str, Any], model: str) -> None:
    reply = litellm.responses(model=f"openai/{model}", input=QUESTION, temperature=0, **where)
    assert reply.output[0].content[0].text == ANSWER
    names = [
        str(event.type.value)
        for event in litellm.responses(model=f"openai/{model}", input=QUESTION, temperature=0, stream=True, **where)
    ]
    assert names[-1] == "response.completed"


def embeddings(where: dict[str, Any], model: str) -> None:
    reply = litellm.embedding(model=f"openai/{model}", input=["a", "b"], **where)
    assert [row["index"] for row in reply.data] == [0, 1]


def errors(where: dict[str, Any], model: str) -> None:
    def create(**more: Any) -> Any:
        return litellm.completion(**{"model": f"openai/{model}", "messages": MESSAGES, **where, **more})

    raises(litellm.NotFoundError, lambda: create(model="openai/gpt-unknown"))
    raises(litellm.BadRequestError, lambda: create(temperature=-3))
    long = [{"role": "user", "content": "word " * 5000}]
    raises(litellm.ContextWindowExceededError, lambda: create(messages=long))
    raises(litellm.Timeout, lambda: create(max_tokens=900, extra_body={"ignore_eos": True}, timeout=0.2))


def router(where: dict[str, Any], model: str) -> None:
    entries = [{"model_name": "any", "litellm_params": {"model": f"openai/{model}", **where}} for _ in range(2)]
    reply = litellm.Router(model_list=entries).completion(model="any", messages=MESSAGES, temperature=0)
    assert reply.choices[0].message.content == ANSWER


CHECKS = [
    chat, chat_streamed, chat_async, text_completion, logprobs, structured_output, tools, responses, embeddings, errors,
    router,
]  # fmt: skip

if __name__ == "__main__":
    url, model = [*sys.argv[1:], "demo"][:2]
    where = {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
    run(f"litellm {version('litellm')}", CHECKS, where, model)
