"""What a client does with requests: ``Client`` has these methods, and ``Driver``, which is one too."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from ..protocol import messages as m
from ..protocol.errors import InvalidRequest, Overloaded, RequestTimeout
from .choices import GroupStream
from .embedding import Embedding
from .questions import Question
from .standing import RequestList, RequestStatus, list_of, status_of
from .stream import Completion, Stream
from .submitting import Prompt, Submitting

OVERLOADED_S = 0.05
MAX_IN_FLIGHT = 256  # for generate_all: enough to keep any batch full, and within every default queue limit


class Requests(Submitting[Stream]):
    """Sends requests to a pipeline and asks about them. From any thread."""

    def _stream(self, request_id: str) -> Stream:
        return Stream(request_id, self._session)

    def _group(self, request_id: str, num_choices: int) -> Stream:
        return GroupStream(request_id, num_choices, self._session)

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

        A prompt may be a mapping with its own arguments for ``submit``. ``progress`` is called with each completion;
        it may store an answer that is kept (``keep``), and then ``forget`` it.

        Raises:
            RequestError: a request failed; the others are aborted, except those with ``keep``.
            Overloaded: so many answers are kept and not forgotten that there is no room for another.
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
            except Overloaded as error:  # retried once an answer of ours ended, or after a pause if others fill it
                running = next((s for _, s in waiting if not s.done), None)
                if running is not None:
                    running.wait()
                elif is_full_of_kept(error, arguments):
                    raise
                else:
                    time.sleep(OVERLOADED_S)
                waiting[0] = arguments, self.submit(**arguments)
        waiting.popleft()
        if progress is not None:
            progress(completion)
        return completion

    def info(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return the model, its limits, and the limits of the service."""
        return dict(self._answer(m.GetInfo(), timeout).info)

    def stats(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return queues, pages, rates and totals of every stage, up to 250 ms old."""
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


def is_full_of_kept(error: Overloaded, arguments: Mapping[str, Any]) -> bool:
    """Whether answers that this client keeps leave no room for another, so that waiting would take a whole lease."""
    return error.param == "lease_s" and bool(arguments.get("keep"))


def several(prompts: Iterable[Prompt | Mapping[str, Any]]) -> Iterable[Prompt | Mapping[str, Any]]:
    """The prompts, unless they are one.

    Raises:
        InvalidRequest: they are one prompt, whose characters or keys would be taken for prompts.
    """
    if isinstance(prompts, (str, bytes, bytearray, Mapping)):
        raise InvalidRequest(f"prompts must be several, got one: {prompts!r:.100}", param="prompts")
    return prompts


def arguments_of(prompt: Prompt | Mapping[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``submit`` for one of the prompts of ``generate_all``."""
    return {**options, **(prompt if isinstance(prompt, Mapping) else {"prompt": prompt})}
