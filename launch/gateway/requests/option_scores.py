"""How likely a model finds each of several continuations of a prompt: one request per token that needs it.

The pipeline returns the log-probability of the chosen token and of the likeliest others. A bias makes it choose the
token of interest; the log-probability is the model's own, before any bias. Options with a common prefix share its
requests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from ....driver.stream import Completion
from ....protocol.sampling import MAX_LOGPROBS
from ..errors import ApiError, aborted, unsupported
from ..schemas.sampling import ServiceFields
from ..state import Gateway
from .ids import new_id
from .submission import MAX_IN_FLIGHT
from .token_ids import prompt_ids

CONCURRENT = 32  # prompts in flight at once
FORCE = 100.0
MAX_OPTION_TOKENS = 64
Path = tuple[int, ...]  # the first tokens of an option
Prompt = Callable[[], Mapping[str, Any]]  # the fields of a text or a chat
T = TypeVar("T")


class OptionScorer:
    """The requests of one decision. Their ids are ``request_id`` followed by a number."""

    def __init__(self, gateway: Gateway, request_id: str, options: Mapping[str, Any], *, param: str) -> None:
        """``param``: the field that errors name."""
        self.request_id = request_id
        self.completions: list[Completion] = []
        self.num_prompt_tokens = 0  # each prompt counts once, however many requests its options need
        self._param = param
        self._gateway = gateway
        self._options = dict(options)
        self._num_sent = 0
        self._room = asyncio.Semaphore(MAX_IN_FLIGHT)

    @classmethod
    def of(
        cls, gateway: Gateway, request: Request, kind: str, model: str, body: ServiceFields, *, param: str
    ) -> OptionScorer:
        """For a ``request`` with this ``body``."""
        scorer = cls(gateway, new_id(kind), {**body.service_options(), **gateway.adapter_option(model)}, param=param)
        request.state.request_id = scorer.request_id
        return scorer

    async def score_all(self, asked: Sequence[tuple[Prompt, Sequence[str]]]) -> list[list[float]]:
        """Log-probabilities of the options of each prompt, which is made when it is needed: all may be long.

        The first one runs alone: it computes what they share.
        """
        gate = asyncio.Semaphore(CONCURRENT)

        async def score(prompt: Prompt, options: Sequence[str]) -> list[float]:
            async with gate:
                return await self.score(await self.prompt_ids(prompt()), options)

        first = await score(*asked[0])
        return [first, *await together(score(*each) for each in asked[1:])]

    async def prompt_ids(self, prompt: Mapping[str, Any]) -> list[int]:
        """The tokens of a text or a chat, from the pipeline's own tokenizer."""
        completion = await self._ask({**prompt, "max_tokens": 0, "return_prompt": True})
        ids = prompt_ids(completion.summary)
        self.num_prompt_tokens += len(ids)
        return ids

    async def score(self, prompt: Sequence[int], options: Sequence[str]) -> list[float]:
        """The log-probability of each option, summed over its tokens."""
        paths = await asyncio.to_thread(lambda: [self._tokens(option) for option in options])
        known: dict[Path, float] = {}  # of the path's last token, given those before it
        wanted = sorted({path[:size] for path in paths for size in range(1, len(path) + 1)})
        parents: dict[Path, list[int]] = {}
        for path in wanted:
            parents.setdefault(path[:-1], []).append(path[-1])
        await together(self._score_children([*prompt, *p], p, c, known) for p, c in parents.items())
        return [sum(known[path[:size]] for size in range(1, len(path) + 1)) for path in paths]

    def longest(self, options: Iterable[str]) -> int:
        """The number of tokens of the longest of them."""
        return max(len(self._tokens(option)) for option in options)

    def _tokens(self, option: str) -> Path:
        tokens = tuple(self._gateway.words.encode(option, add_special_tokens=False))
        if not 1 <= len(tokens) <= MAX_OPTION_TOKENS:
            raise ApiError(
                f"the option {option!r:.80} has {len(tokens)} tokens, the limits are 1 and {MAX_OPTION_TOKENS}",
                param=self._param,
            )
        return tokens

    async def _score_children(
        self, prompt: list[int], path: Path, children: Sequence[int], known: dict[Path, float]
    ) -> None:
        """Score the continuations of ``path``. One answer includes the likeliest tokens, often all that are needed."""
        for child in children:
            if (*path, child) not in known:
                known.update(
                    {(*path, token_id): value for token_id, value in (await self._logprobs(prompt, child)).items()}
                )

    async def _logprobs(self, prompt: list[int], token_id: int) -> dict[int, float]:
        """Log-probabilities of the tokens after ``prompt``: of ``token_id``, and of the likeliest."""
        completion = await self._ask({
            "prompt": prompt, "max_tokens": 1, "logprobs": MAX_LOGPROBS, "logit_bias": {token_id: FORCE},
            "ignore_eos": True,
        })  # fmt: skip
        [chosen], [[logprob, others]] = completion.token_ids, completion.logprobs or [[0.0, []]]
        if chosen != token_id:
            raise unsupported(
                self._param,
                f"this model cannot score options: it is so sure of token {chosen} that token {token_id} of an option"
                f" is less likely by a factor of more than e^{FORCE:.0f}",
            )
        return {**dict(others), token_id: logprob}

    async def _ask(self, wanted: Mapping[str, Any]) -> Completion:
        async with self._room:
            return await self._answer(wanted)

    async def _answer(self, wanted: Mapping[str, Any]) -> Completion:
        request_id = f"{self.request_id}.{self._num_sent}"
        self._num_sent += 1
        stream = self._gateway.client.submit(request_id=request_id, **{**self._options, **wanted})
        try:
            completion = await stream.result()
        finally:
            if not stream.done:  # its result is no longer awaited
                stream.abort()
        if completion.finish_reason == "abort":
            raise aborted()
        self.completions.append(completion)
        return completion


def softmax(logprobs: Sequence[float]) -> list[float]:
    """The probability of each option among all of them."""
    greatest = max(logprobs)
    weights = [math.exp(value - greatest) for value in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. As soon as one fails, or the wait is cancelled, the others are cancelled too."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
