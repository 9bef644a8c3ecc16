"""What every client does with requests without waiting: it sends, follows, ends and leaves them."""

from __future__ import annotations

import struct
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ..protocol.errors import InvalidRequest, TriptychError
from ..protocol.sampling import SamplingParams
from .choices import num_choices
from .session import Session
from .stream import Listener

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class _Followed(Listener, Protocol):
    """A stream, as a client sees its own."""

    @property
    def choices(self) -> Sequence[Listener]: ...


StreamT = TypeVar("StreamT", bound=_Followed)


class Submitting(ABC, Generic[StreamT]):
    """Gives a stream for each request; what kind of stream, a subclass says."""

    @property
    @abstractmethod
    def _session(self) -> Session: ...

    @abstractmethod
    def _stream(self, request_id: str) -> StreamT:
        """A stream of one answer."""

    @abstractmethod
    def _group(self, request_id: str, num_choices: int) -> StreamT:
        """A stream of several choices."""

    def submit(
        self,
        /,  # options may have any name: the service refuses those that it does not know
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        params: SamplingParams | None = None,
        keep: bool = False,
        **options: Any,
    ) -> StreamT:
        """Send a request and return at once.

        ``prompt`` is text or token ids; ``messages`` is a chat, whose last message the model continues if
        ``continue_final_message`` is true. Options are the fields of ``SamplingParams``, and ``truncation`` ("none",
        "left", "right", "middle"), ``lease_s``, ``priority``, ``deadline_ms``, ``max_queue_ms``, ``cache_salt`` and
        ``lora`` (see docs/protocol.md). Invalid options are reported by the stream, as is every other error of this
        request. With ``n`` above 1 the stream yields the deltas of all choices and has one stream per choice in
        ``choices``; its result is the first choice, with all of them in ``choices``.

        ``keep`` leaves the answer with the service until its lease ends: sending the same request again with the same
        ``request_id``, or resuming it, gives the same answer.
        """
        request_id = request_id or uuid.uuid4().hex
        request = request_map(prompt, messages, params, options)
        if (count := num_choices(request)) > 1:
            group = self._group(request_id, count)
            self._session.submit(request_id, request, group, group.choices, keep=keep)
            return group
        stream = self._stream(request_id)
        self._session.submit(request_id, request, stream, keep=keep)
        return stream

    def resume(
        self, request_id: str, *, num_tokens: int = 0, num_chars: int | None = 0, n: int = 1, keep: bool = False
    ) -> StreamT:
        """Follow a request again after its first ``num_tokens`` tokens, ``num_chars`` characters of text (None: not
        known). ``keep`` as for ``submit``.

        A request with ``n`` choices is followed from its beginning; single choices can be resumed by their ids in
        ``choices``.
        """
        if n > 1:
            group = self._group(request_id, n)
            self._session.resume_all(request_id, group, group.choices, keep=keep)
            return group
        stream = self._stream(request_id)
        self._session.resume(request_id, stream, num_tokens=num_tokens, num_chars=num_chars, keep=keep)
        return stream

    def abort(self, request_id: str) -> None:
        """Request the end of a request of this client; its stream ends with the finish reason "abort"."""
        self._session.abort(request_id)

    def forget(self, request_id: str) -> None:
        """Tell the service that the answer of an ended request is no longer needed."""
        self._session.forget(request_id)

    def detach(self, request_id: str, error: TriptychError) -> None:
        """End the stream that follows this request here, with an error; the request itself goes on."""
        self._session.detach(request_id, error)


def request_map(
    prompt: Prompt | None, messages: Messages | None, params: SamplingParams | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The request in its wire form. Nothing else is validated here: prepare does that once, for every kind of client.

    Raises:
        InvalidRequest: ``params`` is something else.
    """
    if not isinstance(params, (SamplingParams, type(None))):
        raise InvalidRequest(f"params must be SamplingParams, got {params!r:.100}", param="params")
    request: dict[str, Any] = {} if params is None else params.to_wire()
    request.update(options)
    if prompt is not None:
        # Bytes are no ids, although they are a sequence of ints: most likely a text that was not decoded.
        is_text = isinstance(prompt, (str, bytes, bytearray)) or _is_texts(prompt)
        is_ids = (isinstance(prompt, Sequence) and not is_text) or hasattr(prompt, "tolist")
        request["prompt_token_ids" if is_ids else "prompt"] = _packed_ids(prompt) if is_ids else prompt
    if messages is not None:
        is_list = isinstance(messages, (list, tuple))
        request["messages"] = [_plain(message) for message in messages] if is_list else messages
    return request


def _is_texts(prompt: Any) -> bool:
    """Several prompts where one belongs: refused as what they are, not as ids."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(each, str) for each in prompt)


def _plain(message: Any) -> Any:
    return dict(message) if isinstance(message, Mapping) else message


def _packed_ids(prompt: Any) -> Any:
    """The ids of a sequence, an array or a tensor as int32 bytes."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    # What is not a list of int32 is sent as it is: prepare's refusal then names the wrong value.
    is_list = isinstance(ids, list) and set(map(type, ids)) <= {int}  # an array without axes becomes a number
    if is_list and (not ids or (min(ids) >= -(2**31) and max(ids) < 2**31)):
        return struct.pack(f"<{len(ids)}i", *ids)
    return ids
