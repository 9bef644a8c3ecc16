"""Token ids as they come out of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.requests import Request

from .generation import Generation
from .ids import new_id
from .state import Gateway

# What the question for a prompt has in common with the request that will bring it.
_IN_COMMON = (
    "messages", "continue_final_message", "tools", "chat_template_kwargs", "truncation", "max_prompt_tokens",
    "cache_salt", "priority", "deadline_ms", "max_queue_ms",
)  # fmt: skip


def prompt_ids(summary: Mapping[str, Any]) -> list[int]:
    """The prompt's ids out of the summary of a request with ``return_prompt``."""
    return [int(token_id) for token_id in np.frombuffer(summary["prompt_token_ids"], "<i4")]


async def chat_ids(gateway: Gateway, request: Request, asked: Mapping[str, Any]) -> list[int]:
    """The prompt of a chat, a request for the pipeline, which has the template.

    Raises:
        RequestError: it was refused.
    """
    wanted = {name: asked[name] for name in _IN_COMMON if name in asked} | {"max_tokens": 0, "return_prompt": True}
    generation = await Generation.begin(gateway, request, new_id("tok"), [wanted])
    [completion] = await generation.results()
    return prompt_ids(completion.summary)
