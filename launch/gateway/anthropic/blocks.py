"""An answer as Anthropic's content blocks, complete or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..answer import AnswerReader, Parts
from ..reasoning.thoughts import Thought
from ..serving.streaming import event
from ..tools.parser import UNREADABLE, Call

_TEXTS = {"thinking": "thinking", "text": "text"}  # the field of a block that grows


def blocks_of(parts: Parts, reader: AnswerReader) -> list[dict[str, Any]]:
    """Blocks for reasoning, text and tool calls. Texts of only white space, as between calls, are dropped."""
    blocks: list[dict[str, Any]] = []
    for part in parts:
        block = _block(part, reader)
        name = _TEXTS.get(block["type"])
        if name and blocks and blocks[-1]["type"] == block["type"]:
            blocks[-1][name] += block[name]
        else:
            blocks.append(block)
    return [block for block in blocks if block["type"] != "text" or block["text"].strip()]


def _block(part: Thought | str | Call, reader: AnswerReader) -> dict[str, Any]:
    if isinstance(part, Thought):
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if isinstance(part, str):
        return {"type": "text", "text": part}
    call_id = reader.call_map(part)["id"].replace("call_", "toolu_")
    return {"type": "tool_use", "id": call_id, "name": part.name, "input": _input(part)}


def _input(call: Call) -> dict[str, Any]:
    """Always an object that a reply can contain, whatever the model wrote."""
    try:
        value = json.loads(call.arguments)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # fails for NaN, and for half a surrogate pair
    except UNREADABLE:
        value = call.arguments
    return value if isinstance(value, dict) else {"arguments": value}


class BlockWriter:
    """The events of one message. Invariant: at most one block is open."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._index = -1
        self._open: str | None = None  # the type of the block
        self._space = ""  # pending white space before a text

    def event(self, kind: str, /, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, name=kind)

    def parts(self, parts: Parts) -> Iterator[bytes]:
        for part in parts:
            block = _block(part, self._reader)
            kind = block["type"]
            if kind == "text" and self._open != "text":
                block["text"] = self._space + block["text"]
                self._space = block["text"] if block["text"].isspace() else ""
                if self._space:
                    continue
            elif kind != "text":
                self._space = ""
            name = _TEXTS.get(kind, "input")
            if kind != self._open or kind == "tool_use":
                yield from self.close()
                self._open, self._index = kind, self._index + 1
                empty = {**block, name: {} if name == "input" else ""}
                yield self.event("content_block_start", index=self._index, content_block=empty)
            if name == "input":
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
            else:
                delta = {"type": f"{name}_delta", name: block[name]}
            yield self.event("content_block_delta", index=self._index, delta=delta)

    def close(self) -> Iterator[bytes]:
        """The event that ends the open block, if any."""
        if self._open is not None:
            self._open = None
            yield self.event("content_block_stop", index=self._index)
