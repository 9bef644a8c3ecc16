"""What a client does with requests: ``Client`` has these methods, and ``Driver``, which is one too."""

from __future__ import annotations

import struct
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from ..protocol import messages as m
from ..protocol.errors import InvalidRequest, Overloaded, RequestTimeout, TriptychError
from ..protocol.sampling import SamplingParams
from .choices import GroupStream, num_choices
from .embedding import Embedding
from .questions import Question
from .session import Session
from .standing import RequestList, RequestStatus, list_of, status_of
from .stream import Completion, Stream

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
OVERLOADED_S = 0.05
MAX_IN_FLIGHT = 256  # for generate_all: enough to keep any batch full, and within every default queue limit


class Requests(ABC):
    """Sends requests to a pipeline and asks about them. From any thread."""

    @property
    @abstractmethod
    def _session(self) -> Session: ...

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
    ) -> Stream:
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
            group = GroupStream(request_id, count, self._session)
            self._session.submit(request_id, request, group, group.choices, keep=keep)
            return group
        stream = Stream(request_id, self._session)
        self._session.submit(request_id, request, stream, keep=keep)
        return stream

    def resume(
        self, request_id: str, *, num_tokens: int = 0, num_chars: int | None = 0, n: int = 1, keep: bool = False
    ) -> Stream:
        """Follow a request again after its first ``num_tokens`` tokens, ``num_chars`` characters of text (None: not
        known). ``keep`` as for ``submit``.

        A request with ``n`` choices is followed from its beginning; single choices can be resumed by their ids in
        ``choices``.
        """
        if n > 1:
            group = GroupStream(request_id, n, self._session)
            self._session.resume_all(request_id, group, group.choices, keep=keep)
            return group
        stream = Stream(request_id, self._session)
        self._session.resume(request_id, stream, num_tokens=num_tokens, num_chars=num_chars, keep=keep)
        return stream

    def generate(self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Any) -> Completion:
        """Return one complete answer. Arguments as for ``submit``.

        If the wait ends early, after ``timeout`` seconds or by Ctrl-C, the request is aborted unless ``keep`` is set.
        """
        stream = self.submit(prompt, **options)
        try:
            return stream.result(timeout)
        except BaseException:
            if not options.get("keep"):
                stream.abort()  # no effect if it has ended
            raise

    def generate_all(
        self,
        prompts: Iterable[Prompt | Mapping[str, Any]],
        *,
        progress: Callable[[Completion], None] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Answers to many prompts, in their order, with as many in flight as the pipeline accepts.

        A prompt may be a mapping with its own arguments for ``submit``. ``progress`` is called with each completion.

        Raises:
            RequestError: a request failed; the others are aborted, except those with ``keep``.
        """
        waiting: deque[tuple[dict[str, Any], Stream]] = deque()
        results: list[Completion] = []
        try:
            for prompt in several(prompts):
                arguments = arguments_of(prompt, options)
                waiting.append((arguments, self.submit(**arguments)))
                if len(waiting) >= MAX_IN_FLIGHT:
                    results.append(self._first(waiting, progress))
            while waiting:
                results.append(self._first(waiting, progress))
        finally:
            for arguments, stream in waiting:
                if not arguments.get("keep"):
                    stream.abort()
        return results

    def embed(self, prompt: Prompt, *, timeout: float | None = None, **options: Any) -> Embedding:
        """Return the embedding of text or token ids, cut to ``dimensions`` if given. Arguments as for ``submit``."""
        return Embedding.of(self.generate(prompt, timeout=timeout, embedding=True, **options))

    def embed_all(
        self,
        prompts: Iterable[Prompt | Mapping[str, Any]],
        *,
        progress: Callable[[Embedding], None] | None = None,
        **options: Any,
    ) -> list[Embedding]:
        """The embeddings of many prompts, in their order; see ``embed`` and ``generate_all``."""
        tell = None if progress is None else lambda completion: progress(Embedding.of(completion))
        return [Embedding.of(each) for each in self.generate_all(prompts, progress=tell, embedding=True, **options)]

    def _first(
        self, waiting: deque[tuple[dict[str, Any], Stream]], progress: Callable[[Completion], None] | None
    ) -> Completion:
        """The answer to the first one, which stays in ``waiting`` until its answer is complete."""
        while True:
            arguments, stream = waiting[0]
            try:
                completion = stream.result()
                break
            except Overloaded:  # retried once an answer of ours made room, or after a pause if others fill the queue
                running = next((s for _, s in waiting if not s.done), None)
                if running is not None:
                    running.wait()
                else:
                    time.sleep(OVERLOADED_S)
                waiting[0] = arguments, self.submit(**arguments)
        waiting.popleft()
        if progress is not None:
            progress(completion)
        return completion

    def abort(self, request_id: str) -> None:
        """Request the end of a request of this client; its stream ends with the finish reason "abort"."""
        self._session.abort(request_id)

    def forget(self, request_id: str) -> None:
        """Tell the service that the answer of an ended request is no longer needed."""
        self._session.forget(request_id)

    def detach(self, request_id: str, error: TriptychError) -> None:
        """End the stream that follows this request here, with an error; the request itself goes on."""
        self._session.detach(request_id, error)

    def info(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return the model, its limits, and the limits of the service."""
        return dict(self._answer(m.GetInfo(), timeout).info)

    def stats(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return queues, pages, rates and totals of every stage."""
        return dict(self._answer(m.GetStats(), timeout).stats)

    def status(self, request_id: str, timeout: float = 10.0) -> RequestStatus:
        """Where a request stands; an unknown one has the state "unknown"."""
        return status_of(self._answer(m.GetStatus(request_id), timeout))

    def requests(self, limit: int = m.MAX_REQUEST_ROWS, timeout: float = 10.0) -> RequestList:
        """All requests that are live or whose answer is kept, the first ``limit`` in order of arrival."""
        return list_of(self._answer(m.GetRequests(limit), timeout))

    def _answer(self, question: Question, timeout: float) -> Any:
        future = self._session.ask(question)
        try:
            return future.result(timeout)
        except FutureTimeout as error:
            future.cancel()  # it is not repeated any more
            raise RequestTimeout(f"{type(question).__name__}: no answer within {timeout} s") from error


def several(prompts: Iterable[Prompt | Mapping[str, Any]]) -> Iterable[Prompt | Mapping[str, Any]]:
    """
    Raises:
        InvalidRequest: they are one prompt, whose characters or keys would be taken for prompts.
    """
    if isinstance(prompts, (str, bytes, bytearray, Mapping)):
        raise InvalidRequest(f"prompts must be several, got one: {prompts!r:.100}", param="prompts")
    return prompts


def arguments_of(prompt: Prompt | Mapping[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``submit`` for one of the prompts of ``generate_all``."""
    return {**options, **(prompt if isinstance(prompt, Mapping) else {"prompt": prompt})}


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
    # Values that are not int32 are sent as they are: prepare's refusal then names the wrong one.
    if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= -(2**31) and max(ids) < 2**31)):
        return struct.pack(f"<{len(ids)}i", *ids)
    return ids
