"""Anthropic's Python client: ``python anthropic_client.py http://127.0.0.1:8000 [model]``, model demo."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import Message
from checks import ANSWER, MESSAGES, PERSON, WEATHER, raises, run

TOOL: dict[str, Any] = {
    **{k: v for k, v in WEATHER.items() if k != "parameters"},
    "input_schema": WEATHER["parameters"],
}
GREEDY: dict[str, Any] = {"temperature": 0}  # some versions have no argument for it
NUM_CONCURRENT = 16


def ask(client: Anthropic, model: str, **fields: Any) -> Any:
    reply = client.messages.create(
        **{"model": model, "max_tokens": 60, "messages": MESSAGES, "extra_body": GREEDY, **fields}
    )
    Message.model_validate_json(reply.model_dump_json(), strict=True)
    return reply


def message(client: Anthropic, model: str) -> None:
    reply = ask(client, model, metadata={"user_id": "me"})
    assert [block.text for block in reply.content] == [ANSWER]
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert reply.usage.output_tokens > 1
    assert reply._request_id


def message_streamed(client: Anthropic, model: str) -> None:
    with client.messages.stream(model=model, max_tokens=60, messages=MESSAGES, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert (final.stop_reason, final.content[0].text) == ("end_turn", ANSWER)
    assert final.usage.output_tokens > 1


def several_turns(client: Anthropic, model: str) -> None:
    first = ask(client, model, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    again = ask(client, model, messages=[*MESSAGES, {"role": "assistant", "content": first.content}, *MESSAGES])
    assert again.content


def begun_turn(client: Anthropic, model: str) -> None:
    begun = ANSWER[: ANSWER.index(" ")]
    reply = ask(client, model, messages=[*MESSAGES, {"role": "assistant", "content": begun}])
    assert begun + reply.content[0].text == ANSWER


def forced_call(client: Anthropic, model: str) -> None:
    choice = {"type": "tool", "name": TOOL["name"]}
    reply = ask(client, model, tools=[TOOL], tool_choice=choice)
    [call] = reply.content
    assert (reply.stop_reason, call.type, call.name) == ("tool_use", "tool_use", TOOL["name"])
    assert call.input["city"] in ("Rome", "Oslo")
    with client.messages.stream(
        model=model, max_tokens=60, messages=MESSAGES, tools=[TOOL], tool_choice=choice, extra_body=GREEDY
    ) as stream:
        assert stream.get_final_message().content[0].input == call.input


def structured(client: Anthropic, model: str) -> None:
    form = {"format": {"type": "json_schema", "schema": PERSON}}
    reply = ask(client, model, max_tokens=300, extra_body={"output_config": form})
    assert set(json.loads(reply.content[0].text)) == {"name", "age"}


def ends(client: Anthropic, model: str) -> None:
    assert ask(client, model, max_tokens=2).stop_reason == "max_tokens"
    reply = ask(client, model, stop_sequences=["items"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "items")


def count_of_tokens(client: Anthropic, model: str) -> None:
    count = client.messages.count_tokens(model=model, messages=MESSAGES)
    usage = ask(client, model).usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def refusals(client: Anthropic, model: str) -> None:
    raises(anthropic.NotFoundError, lambda: ask(client, "other"))
    wrong: list[dict[str, Any]] = [{"max_tokens": 0}, {"extra_body": {"unknown": 1}}, {"messages": []}]
    for fields in wrong:
        raises(anthropic.BadRequestError, lambda fields=fields: ask(client, model, **fields))


def many_at_once(client: Anthropic, model: str) -> None:
    async def ask_all() -> list[Any]:
        async with AsyncAnthropic(base_url=str(client.base_url), api_key="none") as several:
            asked: dict[str, Any] = {"model": model, "max_tokens": 60, "messages": MESSAGES, "extra_body": GREEDY}
            return await asyncio.gather(*(several.messages.create(**asked) for _ in range(NUM_CONCURRENT)))

    assert [reply.content[0].text for reply in asyncio.run(ask_all())] == [ANSWER] * NUM_CONCURRENT


CHECKS = [
    message, message_streamed, several_turns, begun_turn, forced_call, structured, ends, count_of_tokens, refusals,
    many_at_once,
]  # fmt: skip


if __name__ == "__main__":
    url, model = [*sys.argv[1:], "demo"][:2]
    with Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        run(f"anthropic {anthropic.__version__}", CHECKS, client, model)
