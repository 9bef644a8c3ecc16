"""Shared by the reply formats of all routes: the head of a reply, and chunks that hardly change from token to token."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..serving.streaming import to_json


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that every chunk of one reply repeats."""

    request_id: str
    object: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self) -> dict[str, Any]:
        return {"id": self.request_id, "object": self.object, "created": self.created, "model": self.model}


class TextShape(NamedTuple):
    """The JSON of a choice around its text, without the index."""

    before: str
    after: str


CHAT_TEXT = TextShape('"delta":{"content":', '},"logprobs":null,"finish_reason":null')
COMPLETION_TEXT = TextShape('"text":', ',"logprobs":null,"finish_reason":null')


class ChunkWriter:
    """Serializes the chunks of a stream. The parts around the text are prepared once; a token costs one JSON string."""

    def __init__(
        self, head: Head, *, shape: TextShape, with_usage: bool,
        positions: list[int] | None = None, num_prompt_tokens: int | None = None,
    ) -> None:  # fmt: skip
        """With ``positions``, the tokens that the client has of each choice, every chunk gets an id with the new
        positions. With ``num_prompt_tokens`` every chunk has the usage so far.
        """
        self._head = f'data: {to_json(head.fields())[:-1]},"choices":'
        self._before, self._after = shape
        self._usage = ',"usage":null' if with_usage else ""
        self._positions = positions
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens: dict[int, int] = {}  # of each choice so far

    def text(self, index: int, text: str, *, num_tokens: int) -> bytes:
        """A chunk with nothing but text."""
        choice = f'{{"index":{index},{self._before}{to_json(text)}{self._after}}}'
        return self._event(f"[{choice}]", index, num_tokens)

    def choice(self, choice: dict[str, Any], *, num_tokens: int) -> bytes:
        return self._event(to_json([choice]), choice["index"], num_tokens)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk with the usage and without choices."""
        return f'{self._head}[],"usage":{to_json(usage)}}}\n\n'.encode()

    def _event(self, choices: str, index: int, num_tokens: int) -> bytes:
        event_id = "" if self._positions is None else self._event_id(self._positions, index, num_tokens)
        usage = self._usage if self._num_prompt_tokens is None else self._usage_so_far(index, num_tokens)
        return f"{event_id}{self._head}{choices}{usage}}}\n\n".encode()

    def _event_id(self, positions: list[int], index: int, num_tokens: int) -> str:
        positions[index] = num_tokens
        return f"id: {','.join(map(str, positions))}\n"

    def _usage_so_far(self, index: int, num_tokens: int) -> str:
        self._num_tokens[index] = num_tokens
        num_prompt, num_output = self._num_prompt_tokens or 0, sum(self._num_tokens.values())
        total = num_prompt + num_output
        return f',"usage":{{"prompt_tokens":{num_prompt},"completion_tokens":{num_output},"total_tokens":{total}}}'
