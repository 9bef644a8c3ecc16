"""/v1/completions: continues a text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from ....driver.stream import Completion, Delta
from ..errors import ApiError, unsupported
from ..forms.structure import structured_options
from ..requests.generation import Generation
from ..requests.ids import new_id
from ..requests.parameters import COMPLETION_TOKENS, check_stream, form_name, named_as, pipeline_options
from ..requests.replies import COMPLETION_TEXT, ChunkWriter, Head
from ..requests.token_ids import prompt_ids
from ..requests.usage import usage
from ..schemas.completions import MAX_PROMPTS, CompletionRequest
from ..schemas.sampling import says_usage
from ..serving.streaming import DONE
from ..state import Gateway
from .logprobs import completion_logprobs, echo_logprobs, joined, prompt_logprobs
from .text_offsets import TextOffsets, prompt_offsets

KIND = "cmpl"
OBJECT = "text_completion"


async def create_completion(gateway: Gateway, body: CompletionRequest, request: Request) -> ASGIApp:
    """The reply, complete or as a stream.

    Raises:
        TriptychError: the request was refused.
    """
    model = gateway.ready_model(body.model)
    head = Head(new_id(KIND, body.request_id, num_choices=body.n or 1), OBJECT, model)
    check_stream(body)
    _check_combination(body)
    with named_as(prompt_token_ids="prompt", structured=form_name(body)):
        requests = _requests(gateway, body)
        generation = await Generation.begin(
            gateway, request, head.request_id, requests, model=model, keep=bool(body.resumable)
        )
        reply = CompletionReply(gateway, head, body)
        if body.stream:
            return generation.stream(reply.events(generation))
        return await generation.reply(reply.whole)


def _check_combination(body: CompletionRequest) -> None:
    n, best_of = body.n or 1, body.best_of or body.n or 1
    num_prompts = len(body.prompts())
    if not 1 <= num_prompts <= MAX_PROMPTS:
        raise ApiError(f"prompt has {num_prompts} entries, the limits are 1 and {MAX_PROMPTS}", param="prompt")
    if best_of < n:
        raise ApiError(f"best_of is {best_of}, it must be at least n, {n}", param="best_of")
    if best_of > n and body.stream:
        raise unsupported("best_of", "best_of chooses among complete answers, so it cannot be combined with stream")
    if body.echo and body.logprobs is not None and body.stream:
        raise unsupported("logprobs", "with echo, logprobs need a complete answer: they cannot be combined with stream")
    if body.resumable and num_prompts > 1:
        raise unsupported("resumable", f"prompt has {num_prompts} entries, a resumable request has one")


def _requests(gateway: Gateway, body: CompletionRequest) -> list[dict[str, Any]]:
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
    options = pipeline_options(
        body, gateway, max_tokens=max_tokens, logprobs=body.logprobs,
        prompt_logprobs=max((count for count in asked if count is not None), default=None),
    )  # fmt: skip
    options |= structured_options(body.response_format, body.structured_outputs)
    if body.best_of is not None:
        options["best_of"] = body.best_of
    return [{"prompt": prompt, **options} for prompt in body.prompts()]


@dataclass
class CompletionReply:
    """Produces one reply, complete or as events."""

    gateway: Gateway
    head: Head
    body: CompletionRequest
    positions: list[int] | None = None  # tokens that the client has of each choice; None: it is a new request

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        n = self.body.n or 1
        # The first choice of each prompt carries what is known of the prompt.
        choices = [
            self._choice(i, each, first=completions[i - i % n], echo=echo)
            for i, (each, echo) in enumerate(zip(completions, self._echoes(), strict=True))
        ]
        return {**self.head.fields(), "choices": choices, "usage": usage(completions, num_choices=n)}

    def _echoes(self) -> list[str]:
        """The text in front of each choice."""
        if not self.body.echo:
            return [""] * (len(self.body.prompts()) * (self.body.n or 1))
        texts = [each if isinstance(each, str) else self.gateway.words.decode(each) for each in self.body.prompts()]
        return [text for text in texts for _ in range(self.body.n or 1)]

    def _choice(self, index: int, completion: Completion, *, first: Completion, echo: str) -> dict[str, Any]:
        logprobs = self._logprobs(completion, self._offsets(echo))
        if self.body.echo and logprobs is not None:
            offsets = prompt_offsets(self.gateway.words, echo, prompt_ids(first.summary))
            echoed = echo_logprobs(self.gateway.words, first, offsets, top=self.body.logprobs or 0)
            logprobs = joined(echoed, logprobs)
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
        }
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.gateway.words, first, top=self.body.prompt_logprobs)
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = prompt_ids(completion.summary)
        return choice

    def _offsets(self, echo: str) -> TextOffsets | None:
        """For the tokens after the prompt, if their logprobs are wanted."""
        if self.body.logprobs is None:
            return None
        skips = self.body.skip_special_tokens is not False
        return TextOffsets(self.gateway.words, start=len(echo), skip_special_tokens=skips)

    def _logprobs(self, piece: Completion | Delta, offsets: TextOffsets | None) -> dict[str, Any] | None:
        if offsets is None:
            return None
        ids, rows = piece.token_ids, piece.logprobs or []
        return completion_logprobs(self.gateway.words, ids, rows, offsets.of(ids))

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        options, n = self.body.stream_options, self.body.n or 1
        echoes = await asyncio.to_thread(self._echoes) if self.body.echo else self._echoes()
        starts = self.positions or [0] * len(echoes)
        writer = ChunkWriter(
            self.head, shape=COMPLETION_TEXT,
            with_usage=bool(options and options.include_usage),
            positions=list(starts) if self.body.resumable else None,
            num_prompt_tokens=generation.num_prompt_tokens if says_usage(options) else None,
        )  # fmt: skip
        is_plain = self.body.logprobs is None and not self.body.return_token_ids
        offsets = [self._offsets(echo) for echo in echoes]
        for index, echo in enumerate(echoes):
            if echo:
                yield writer.text(index, echo, num_tokens=0)
        async for index, piece in generation.pieces():
            if isinstance(piece, Completion):
                choice = {"index": index, "text": "", "logprobs": None, "finish_reason": piece.finish_reason}
                yield writer.choice(choice, num_tokens=starts[index] + len(piece.token_ids))
            elif is_plain:
                yield writer.text(index, piece.text, num_tokens=piece.num_tokens)
            else:
                choice = {
                    "index": index,
                    "text": piece.text,
                    "logprobs": self._logprobs(piece, offsets[index]),
                    "finish_reason": None,
                    **({"token_ids": piece.token_ids} if self.body.return_token_ids else {}),
                }
                yield writer.choice(choice, num_tokens=piece.num_tokens)
        if options and options.include_usage:
            yield writer.usage(usage(generation.ends, num_choices=n))
        yield DONE
