"""The typed events of a streamed response: each item is opened, filled and closed, and all events are numbered."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from ..serving.streaming import event, to_json
from .packed_reasoning import packed

Event = dict[str, Any]


class EventWriter:
    """Invariant: at most one item is open, and closed items are in ``output``."""

    def __init__(self, message_id: str, *, packs_reasoning: bool) -> None:
        """``message_id``: of the first message; any further ones get new ids. ``packs_reasoning``: its items have
        ``encrypted_content``.
        """
        self.output: list[dict[str, Any]] = []
        self._message_id = message_id
        self._packs_reasoning = packs_reasoning
        self._number = 0
        self._texts: list[str] | None = None  # of the open message; None: none is open
        self._thoughts: list[str] = []  # of the open reasoning item; empty: none is open
        self._reasoning_id = ""  # of the open reasoning item
        self._logprobs: list[dict[str, Any]] = []  # of the open message
        self._space: tuple[str, list[dict[str, Any]]] = "", []  # white space before a message, with its logprobs

    def event(self, kind: str, /, **fields: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def thought(self, text: str) -> Iterator[Event]:
        """More of the reasoning, which precedes everything else except in channels."""
        if not self._thoughts:
            if not (text := text.lstrip("\n")):  # which separates the thoughts of several messages
                return
            yield from self._close_message()
            self._reasoning_id = f"rs_{uuid.uuid4().hex}"
            item = {**_reasoning_item(self._reasoning_id, ""), "content": [], "status": "in_progress"}
            yield self.event("response.output_item.added", output_index=len(self.output), item=item)
            yield self.event("response.content_part.added", **self._thought_place(), part=_thought_part(""))
        self._thoughts.append(text)
        yield self.event("response.reasoning_text.delta", **self._thought_place(), delta=text)

    def text(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """More text of the message, and the logprobs of its tokens if requested.

        White space alone does not open a message: it is mostly found between two calls.
        """
        if self._texts is None:
            text, logprobs = self._space[0] + text, self._space[1] + logprobs
            self._space = (text, logprobs) if text.isspace() else ("", [])
            if text.isspace():
                return
            yield from self._open_message()
        assert self._texts is not None, "just opened"
        self._texts.append(text)
        self._logprobs += logprobs
        yield self.event("response.output_text.delta", **self._place(), delta=text, logprobs=logprobs)

    def call(self, item: dict[str, Any]) -> Iterator[Event]:
        """A complete tool call."""
        yield from self._close_thoughts()
        yield from self._close_message()
        index = len(self.output)
        yield self.event(
            "response.output_item.added", output_index=index, item={**item, "arguments": "", "status": "in_progress"}
        )
        place = {"item_id": item["id"], "output_index": index}
        yield self.event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        yield self.event(
            "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
        )
        self.output.append(item)
        yield self.event("response.output_item.done", output_index=index, item=item)

    def close(self, logprobs: list[dict[str, Any]], *, is_whole: bool) -> Iterator[Event]:
        """Close the last item; an answer without any text or call gets an empty message.

        ``logprobs``: of its last tokens, which have no text, such as the one that ended it. ``is_whole``: it was not
        cut by a limit.
        """
        yield from self._close_thoughts()
        if self._texts is None and all(item["type"] == "reasoning" for item in self.output):
            yield from self._open_message()
        space, logprobs = self._space[0], self._space[1] + logprobs
        if self._texts is not None and (space or logprobs):
            yield from self.text(space, logprobs)
        yield from self._close_message(is_whole=is_whole)

    def _open_message(self) -> Iterator[Event]:
        yield from self._close_thoughts()
        self._texts, self._logprobs = [], []
        item = {"id": self._message_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        yield self.event("response.output_item.added", output_index=len(self.output), item=item)
        yield self.event("response.content_part.added", **self._place(), part=_part("", []))

    def _close_thoughts(self) -> Iterator[Event]:
        if not self._thoughts:
            return
        text, place = "".join(self._thoughts), self._thought_place()
        self._thoughts = []
        yield self.event("response.reasoning_text.done", **place, text=text)
        yield self.event("response.content_part.done", **place, part=_thought_part(text))
        item = _reasoning_item(self._reasoning_id, text)
        if self._packs_reasoning:
            item["encrypted_content"] = packed(text)
        yield self.event("response.output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)

    def _thought_place(self) -> dict[str, Any]:
        return {"item_id": self._reasoning_id, "output_index": len(self.output), "content_index": 0}

    def _close_message(self, *, is_whole: bool = True) -> Iterator[Event]:
        if self._texts is None:
            return
        text, place, logprobs = "".join(self._texts), self._place(), self._logprobs
        item = _message_item(self._message_id, text, logprobs, is_whole=is_whole)
        yield self.event("response.output_text.done", **place, text=text, logprobs=logprobs)
        yield self.event("response.content_part.done", **place, part=item["content"][0])
        self._texts, self._message_id = None, f"msg_{uuid.uuid4().hex}"
        yield self.event("response.output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": len(self.output), "content_index": 0}


class EventEncoder:
    """Encodes the logprobs of each token once: four events at the end repeat those of all tokens, a quarter of a second
    each for 8,192 tokens with 20 alternatives, in which no other stream of the process would go on.
    """

    def __init__(self) -> None:
        self._logprobs: dict[str, list[str]] = {}  # by message: JSON without brackets

    def encode(self, content: Event) -> bytes:
        if content["type"] == "response.output_text.delta" and content["logprobs"]:
            encoded = to_json(content["logprobs"])
            self._logprobs.setdefault(content["item_id"], []).append(encoded[1:-1])
            marked = {**content, "logprobs": _mark(content["item_id"])}
            return self._spliced(marked, {content["item_id"]: encoded})
        ids: set[str] = set()
        if (response := content.get("response")) is not None:  # whose other fields are the client's
            output = self._marked(response["output"], None, ids)
            marked = {**content, "response": {**response, "output": output}}
        else:
            marked = self._marked(content, content.get("item_id"), ids)
        return self._spliced(marked, {item_id: f"[{','.join(self._logprobs[item_id])}]" for item_id in ids})

    def _marked(self, value: Any, item_id: str | None, ids: set[str]) -> Any:
        """With marks for the logprobs of messages; their ids are added to ``ids``."""
        if isinstance(value, list):
            return [self._marked(each, item_id, ids) for each in value]
        if not isinstance(value, dict):
            return value
        if value.get("type") == "message":
            item_id = value["id"]
        if item_id not in self._logprobs or not value.get("logprobs"):
            return {name: self._marked(each, item_id, ids) for name, each in value.items()}
        ids.add(item_id)
        return {**value, "logprobs": _mark(item_id)}

    @staticmethod
    def _spliced(marked: Event, encoded: dict[str, str]) -> bytes:
        whole = event(marked, name=marked["type"])
        for item_id, logprobs in encoded.items():
            whole = whole.replace(to_json(_mark(item_id)).encode(), logprobs.encode())
        return whole


def _mark(item_id: str) -> str:
    """In place of a message's logprobs. No text contains it, as nobody knows the id before."""
    return f"logprobs of {item_id}"


def _message_item(item_id: str, text: str, logprobs: list[dict[str, Any]], *, is_whole: bool) -> dict[str, Any]:
    """The model's text, as an item of the output."""
    return {
        "id": item_id, "type": "message", "role": "assistant", "status": "completed" if is_whole else "incomplete",
        "content": [_part(text, logprobs)],
    }  # fmt: skip


def _reasoning_item(item_id: str, text: str) -> dict[str, Any]:
    """The model's reasoning, as an item of the output; no summary is generated."""
    return {
        "id": item_id, "type": "reasoning", "summary": [], "content": [_thought_part(text)], "encrypted_content": None,
        "status": "completed",
    }  # fmt: skip


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
