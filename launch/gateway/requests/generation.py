"""One HTTP request on its way through the pipeline: from its submission to its end, whatever its reply looks like."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....driver.stream import Completion
from ....protocol.errors import TriptychError
from ..errors import json_response
from ..serving.long_json import long_json
from ..serving.streaming import COMMENT, COMMENT_AMONG_IDS, EventStream, answered, failure_events
from ..state import Gateway
from .submission import Choices, Piece

logger = logging.getLogger(__name__)

LONG_TOKENS = 2048  # longer replies, which may have logprobs for all tokens, are built outside the event loop


class Generation:
    """Invariant: unless it is to be kept, everything submitted has ended or was aborted when the reply is complete."""

    def __init__(
        self, gateway: Gateway, request: Request, choices: Choices, *, keep: bool, spent_s: float = 0.0
    ) -> None:
        """``spent_s``: the part of the request's time limit used until it was accepted."""
        self._gateway = gateway
        self._request = request
        self._choices = choices
        self._keep = keep
        self._spent_s = spent_s
        self._began = time.monotonic() - spent_s
        self._ends: dict[int, Completion] = {}
        self._error: TriptychError | None = None

    @classmethod
    async def begin(
        cls,
        gateway: Gateway,
        request: Request,
        request_id: str,
        requests: Sequence[Mapping[str, Any]],
        *,
        model: str,
        keep: bool = False,
    ) -> Generation:
        """Submit, and wait until the pipeline has accepted it. ``model``: the model or adapter, by its API name.

        Raises:
            RequestError: it was refused.
            ClientGone: the client has disconnected.
        """
        now = time.monotonic()
        request.state.request_id, request.state.model = request_id, model
        began = request.scope["state"].setdefault("began", now)  # set earlier if another question came first
        requests = [{**asked, **gateway.adapter_option(model)} for asked in requests]
        work = Choices.submit(gateway.client, request_id, requests, keep=keep)
        choices = await answered(request, work, timeout_s=gateway.config.request_timeout_s, spent_s=now - began)
        return cls(gateway, request, choices, keep=keep, spent_s=time.monotonic() - began)

    @classmethod
    def resumed(cls, gateway: Gateway, request: Request, choices: Choices) -> Generation:
        return cls(gateway, request, choices, keep=True)

    @property
    def ends(self) -> list[Completion]:
        """The completed choices, in order."""
        return [self._ends[index] for index in sorted(self._ends)]

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts accepted so far."""
        return self._choices.num_prompt_tokens

    async def results(self) -> list[Completion]:
        """Every complete answer; aborted if the client disconnects meanwhile.

        Raises:
            TriptychError: one failed, or it took too long.
            ClientGone: the client has disconnected.
        """
        try:
            completions: list[Completion] = await answered(
                self._request,
                self._choices.results(),
                timeout_s=self._gateway.config.request_timeout_s,
                spent_s=self._spent_s,
            )
            self._ends = dict(enumerate(completions))
            return completions
        except TriptychError as error:
            self._error = error
            raise
        finally:
            self._close()

    async def reply(self, whole: Callable[[list[Completion]], dict[str, Any]]) -> Response:
        """The reply that ``whole`` builds from the answers; raises what ``results`` raises."""
        completions = await self.results()
        num_tokens = sum(each.usage["prompt_tokens"] + each.usage["completion_tokens"] for each in completions)
        if num_tokens <= LONG_TOKENS:
            return json_response(whole(completions))
        content = await asyncio.to_thread(lambda: long_json(whole(completions)))
        return Response(content, media_type="application/json")

    def pieces(self) -> AsyncIterator[Piece]:
        """See ``Choices.pieces``."""
        return self._choices.pieces(self._ends, interval=self._gateway.config.stream_interval)

    def stream(
        self, events: AsyncIterator[bytes], *, failure_events: Callable[[TriptychError], bytes] = failure_events
    ) -> EventStream:
        """``failure_events``: the final event in case of an error."""

        def failed(error: TriptychError) -> bytes:
            self._error = error
            return failure_events(error)

        limit_s = self._gateway.config.request_timeout_s
        return EventStream(
            events, on_close=self._close, timeout_s=limit_s, spent_s=self._spent_s, failure_events=failed,
            comment=COMMENT_AMONG_IDS if self._keep else COMMENT,
        )  # fmt: skip

    def _close(self) -> None:
        if self._keep:
            self._choices.detach()
        else:
            self._choices.abort()
        self._gateway.tracer(self._request, self.ends)
        if self._error is not None or not (self._ends or self._keep):
            self._gateway.tracer.failed(self._request, self._error, time.monotonic() - self._began)
