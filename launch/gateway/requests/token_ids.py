"""Prompt token ids, obtained from the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from ....driver.prompt_logprobs import read_prompt_ids
from ..state import Gateway
from .generation import Generation
from .ids import new_id
from .parameters import named_as

# The options that a query for a prompt shares with the request it is for.
_IN_COMMON = (
    "messages", "continue_final_message", "tools", "chat_template_kwargs", "truncation", "max_prompt_tokens",
    "return_prompt", "cache_salt", "priority", "deadline_ms", "max_queue_ms",
)  # fmt: skip


def prompt_ids(summary: Mapping[str, Any]) -> list[int]:
    """The prompt's ids, from the summary of a request with ``return_prompt``."""
    ids = read_prompt_ids(summary)
    assert ids is not None, "requested"
    return ids


async def chat_ids(gateway: Gateway, request: Request, asked: Mapping[str, Any]) -> list[int]:
    """The prompt of a chat, rendered by the pipeline, which has the template.

    Raises:
        RequestError: it was refused.
    """
    return prompt_ids(await _prompt(gateway, request, {**asked, "return_prompt": True}))


async def num_chat_tokens(gateway: Gateway, request: Request, asked: Mapping[str, Any]) -> int:
    """The length of a chat's prompt, which may exceed the context: all but the last token are truncated.

    Raises:
        RequestError: it was refused.
    """
    use = (await _prompt(gateway, request, {**asked, "truncation": "left", "max_prompt_tokens": 1}))["usage"]
    return int(use["prompt_tokens"] + use["truncated_tokens"])


async def _prompt(gateway: Gateway, request: Request, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """The summary of a request for no tokens."""
    wanted = {name: asked[name] for name in _IN_COMMON if name in asked} | {"max_tokens": 0}
    with named_as(prompt="messages"):
        generation = await Generation.begin(gateway, request, new_id("tok"), [wanted], model=gateway.model_names[0])
        [completion] = await generation.results()
    return completion.summary
