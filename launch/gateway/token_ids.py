"""Token ids as they come out of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.requests import Request

from .generation import Generation
from .ids import new_id
from .parameters import named_as
from .state import Gateway

# What the question for a prompt has in common with the request that will bring it.
_IN_COMMON = (
    "messages", "continue_final_message", "tools", "chat_template_kwargs", "truncation", "max_prompt_tokens",
    "return_prompt", "cache_salt", "priority", "deadline_ms", "max_queue_ms",
)  # fmt: skip


def prompt_ids(summary: Mapping[str, Any]) -> list[int]:
    """The prompt's ids out of the summary of a request with ``return_prompt``."""
    return [int(token_id) for token_id in np.frombuffer(summary["prompt_token_ids"], "<i4")]


async def chat_ids(gateway: Gateway, request: Request, asked: Mapping[str, Any]) -> list[int]:
    """The prompt of a chat, a request for the pipeline, which has the template.

    Raises:
        RequestError: it was refused.
    """
    return prompt_ids(await _prompt(gateway, request, {**asked, "return_prompt": True}))


async def num_chat_tokens(gateway: Gateway, request: Request, asked: Mapping[str, Any]) -> int:
    """Of the prompt of a chat, which may be longer than the context: all but the last are cut off.

    Raises:
        RequestError: it was refused.
    """
    use = (await _prompt(gateway, request, {**asked, "truncation": "left", "max_prompt_tokens": 1}))["usage"]
    return int(use["prompt_tokens"] + use["truncated_tokens"])


async def _prompt(gateway: Gateway, request: Request, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the pipeline says of it in the summary of a request that wants no answer."""
    wanted = {name: asked[name] for name in _IN_COMMON if name in asked} | {"max_tokens": 0}
    with named_as(prompt="messages"):
        generation = await Generation.begin(gateway, request, new_id("tok"), [wanted], model=gateway.model_names[0])
        [completion] = await generation.results()
    return completion.summary
