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
_SIGNATURE = "triptych"  # checked by nobody, but clients forget reasoning that has none when its turn is over


def blocks_of(parts: Parts, reader: AnswerReader) -> list[dict[str, Any]]:
    """Blocks for reasoning, text and tool calls."""
    blocks: list[dict[str, Any]] = []
    for is_new, block in _Outline(reader).pieces(parts):
        if is_new:
            blocks.append(block)
        else:
            blocks[-1][_TEXTS[block["type"]]] += block[_TEXTS[block["type"]]]
    return blocks


class _Outline:
    """Divides an answer into blocks, which do not depend on how it is cut.

    White space alone, as between calls, is no block. In front of text it belongs to it, in front of reasoning it does
    not.
    """

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._type: str | None = None  # of the last block
        self._space = ""  # held back: more text may follow

    def pieces(self, parts: Parts) -> Iterator[tuple[bool, dict[str, Any]]]:
        """Whether a block begins, and it, or what is added to the last one."""
        for part in parts:
            block = _block(part, self._reader)
            kind = block["type"]
            is_new = kind != self._type or kind not in _TEXTS
            if is_new and kind == "text":
                block["text"] = self._space + block["text"]
                self._space = block["text"] if block["text"].isspace() else ""
                if self._space:
                    continue
            elif is_new and kind == "thinking":
                block["thinking"] = block["thinking"].lstrip()
                if not block["thinking"]:
                    continue
            self._space, self._type = "", kind
            yield is_new, block


def _block(part: Thought | str | Call, reader: AnswerReader) -> dict[str, Any]:
    if isinstance(part, Thought):
        return {"type": "thinking", "thinking": part.text, "signature": _SIGNATURE}
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
        self._outline = _Outline(reader)
        self._index = -1
        self._open: str | None = None  # the type of the block

    def event(self, kind: str, /, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, name=kind)

    def parts(self, parts: Parts) -> Iterator[bytes]:
        for is_new, block in self._outline.pieces(parts):
            name = _TEXTS.get(block["type"], "input")
            if is_new:
                yield from self.close()
                self._open, self._index = block["type"], self._index + 1
                empty = {**block, name: {} if name == "input" else ""}
                if block["type"] == "thinking":
                    empty["signature"] = ""
                yield self.event("content_block_start", index=self._index, content_block=empty)
            if name == "input":
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
            else:
                delta = {"type": f"{name}_delta", name: block[name]}
            yield self.event("content_block_delta", index=self._index, delta=delta)

    def close(self) -> Iterator[bytes]:
        """The events that end the open block, if any: reasoning is signed when it is complete, as by Anthropic."""
        if self._open is not None:
            if self._open == "thinking":
                signed = {"type": "signature_delta", "signature": _SIGNATURE}
                yield self.event("content_block_delta", index=self._index, delta=signed)
            self._open = None
            yield self.event("content_block_stop", index=self._index)
