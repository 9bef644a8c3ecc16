"""What the shapes of all routes share: the head of a reply, and chunks that are mostly the same from token to token."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from .streaming import to_json


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that every chunk of one reply repeats."""

    request_id: str
    object: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self) -> dict[str, Any]:
        return {"id": self.request_id, "object": self.object, "created": self.created, "model": self.model}


class ChunkWriter:
    """Chunks of a stream as bytes. The parts around the text are made once; a token costs one JSON string."""

    def __init__(self, head: Head, *, before_text: str, after_text: str, with_usage: bool, with_ids: bool) -> None:
        """``before_text`` and ``after_text`` are the JSON of a choice around its text, without the index."""
        self._head = to_json(head.fields())[:-1]
        self._before, self._after = before_text, after_text
        self._usage = ',"usage":null' if with_usage else ""
        self._with_ids = with_ids

    def text(self, index: int, text: str, *, num_tokens: int) -> bytes:
        """A chunk that brings text and nothing else."""
        choice = f'{{"index":{index},{self._before}{json.dumps(text, ensure_ascii=False)}{self._after}}}'
        return self._event(f"[{choice}]", num_tokens)

    def choice(self, choice: dict[str, Any], *, num_tokens: int) -> bytes:
        return self._event(to_json([choice]), num_tokens)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk that holds the usage, and no choices."""
        return f'data: {self._head},"choices":[],"usage":{to_json(usage)}}}\n\n'.encode()

    def _event(self, choices: str, num_tokens: int) -> bytes:
        head = f"id: {num_tokens}\n" if self._with_ids else ""
        return f'{head}data: {self._head},"choices":{choices}{self._usage}}}\n\n'.encode()
