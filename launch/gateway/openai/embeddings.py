"""/v1/embeddings: texts as vectors."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ....driver.embedding import Embedding
from ....driver.stream import Completion
from ..errors import ApiError, json_bytes
from ..requests.generation import Generation
from ..requests.ids import new_id
from ..requests.parameters import named_as, prompt_options
from ..requests.replies import Head
from ..requests.usage import embedding_usage
from ..schemas.embeddings import EmbeddingRequest
from ..state import Gateway

KIND = "embd"
OBJECT = "list"
_OPTIONS = ("prompt_name", "dimensions")


async def create_embeddings(gateway: Gateway, body: EmbeddingRequest, request: Request) -> Response:
    """The reply with an embedding for each input, in their order.

    Raises:
        TriptychError: one of them was refused.
    """
    model = gateway.ready_model(body.model)
    head = Head(new_id(KIND, None, num_choices=1), OBJECT, model)
    if not (inputs := body.inputs()):
        raise ApiError("input is empty, it must have at least one entry", param="input")
    options: dict[str, Any] = {"embedding": True, **prompt_options(body)}
    options |= {name: value for name in _OPTIONS if (value := getattr(body, name)) is not None}
    if body.normalize not in (None, does := gateway.card.normalizes_embeddings):
        why = f"the model {'scales' if does else 'does not scale'} embeddings to length 1"
        raise ApiError(f"normalize is {str(body.normalize).lower()}: {why}", param="normalize")
    with named_as(prompt="input", prompt_token_ids="input", embedding="model"):
        requests = [{"prompt": each, **options} for each in inputs]
        generation = await Generation.begin(gateway, request, head.request_id, requests, model=model)
        completions = await generation.results()
        return await asyncio.to_thread(_reply, head, completions, body.encoding_format or "float")


def _reply(head: Head, completions: list[Completion], encoding: str) -> Response:
    """Encoded row by row, as a thread gives way only between calls: one call for all numbers holds up every stream, for
    2,048 embeddings of 4,096 numbers by five seconds.
    """
    rows = (
        {"object": "embedding", "index": index, "embedding": _encoded(Embedding.of(completion), encoding)}
        for index, completion in enumerate(completions)
    )
    data, end = b",".join(map(json_bytes, rows)), json_bytes(embedding_usage(completions))
    content = b"".join((json_bytes(head.fields())[:-1], b',"data":[', data, b'],"usage":', end, b"}"))
    return Response(content, media_type="application/json")


def _encoded(embedding: Embedding, encoding: str) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(embedding.values.astype("<f4").tobytes()).decode()
    numbers: list[float] = embedding.values.astype(np.float64).tolist()
    return numbers
