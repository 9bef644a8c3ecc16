"""A caller's view of one request: deltas as they arrive, and the completion at the end."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..protocol.errors import InvalidRequest, PipelineClosed, RequestTimeout, TriptychError
from ..protocol.messages import Accepted, Failed, Finished
from .embedding import read_embedding
from .origin import Origin
from .prompt_logprobs import PromptLogprob, read_prompt_ids, read_prompt_logprobs

logger = logging.getLogger(__name__)

MAX_MISPLACED = 8
Logprobs = list[list[Any]]  # one row per token: [logprob of the chosen, [[token id, logprob], ...]]


@dataclass(slots=True)  # not frozen, which takes six times as long to make: there is one per token
class Delta:
    """What became final since the last delta. ``text`` may be empty while a character is incomplete."""

    text: str  # to be appended
    token_ids: list[int]  # to be appended
    num_tokens: int  # of the answer so far, including these
    tokens_per_second: float | None = None  # of the answer so far
    logprobs: Logprobs | None = None  # per token [its logprob, [[token id, logprob], ...]], if requested
    index: int = 0  # of the choice, if the request has several
    num_chars: int = 0  # of the answer so far, including these

    @classmethod
    def joined(cls, deltas: Sequence[Delta]) -> Delta:
        """Some deltas in a row, of one choice, as one."""
        if len(deltas) == 1:
            return deltas[0]
        last = deltas[-1]
        return cls(
            "".join(delta.text for delta in deltas),
            [token_id for delta in deltas for token_id in delta.token_ids],
            last.num_tokens,
            last.tokens_per_second,
            [row for delta in deltas for row in delta.logprobs or []] or None,  # the last may have no tokens
            last.index,
            last.num_chars,
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """One answered request: its text, or the best of its choices."""

    request_id: str  # as given or generated
    text: str  # the whole answer
    token_ids: list[int]  # of the whole answer
    finish_reason: str  # "stop" | "length" | "abort"
    logprobs: Logprobs | None  # per token [its logprob, [[token id, logprob], ...]], if requested
    summary: dict[str, Any] = field(repr=False)  # usage and ledger
    group: tuple[Completion, ...] = field(default=(), repr=False)  # all choices of its request, if there are several

    @property
    def choices(self) -> list[Completion]:
        """Every choice of the request, in order; the completion itself if there is only one."""
        return list(self.group) or [self]

    @property
    def index(self) -> int:
        """The position among the choices of its request."""
        return int(self.summary.get("index", 0))

    @property
    def score(self) -> float | None:
        """What it was ranked by: a hypothesis' score, or the mean logprob with ``best_of``; else None."""
        score: float | None = self.summary.get("score")
        return score

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """If the request asked for ``return_prompt`` or ``prompt_logprobs``: its tokens, after truncation."""
        return read_prompt_ids(self.summary)

    @property
    def prompt_logprobs(self) -> list[PromptLogprob | None] | None:
        """If the request asked for ``prompt_logprobs``: one entry per token of the prompt, None for the first, which
        has nothing before it. Of several choices only the first has them.
        """
        return read_prompt_logprobs(self.summary)

    @property
    def embedding(self) -> npt.NDArray[np.float32] | None:
        """If the request asked for ``embedding``: its prompt as a vector, read-only; else None."""
        return read_embedding(self.summary)

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of the prompt, how many of them were cached or truncated, and tokens of the answer.

        Empty, like the ledger, if the service did not end the request: then it is the ``partial`` of an error.
        """
        return dict(self.summary.get("usage", {}))

    @property
    def ledger(self) -> dict[str, Any]:
        """Milliseconds per stage, TTFT, TPS and inter-token percentiles."""
        return dict(self.summary.get("ledger", {}))


class Listener(Protocol):
    """Receives the events of one request, in order, in the session's thread. Must not block."""

    def on_accepted(self, accepted: Accepted) -> None: ...

    def on_delta(self, delta: Delta) -> None: ...

    def on_end(self, completion: Completion, error: TriptychError | None) -> None:
        """Called once, as the last event. With an error, ``completion`` holds what was produced before it."""
        ...


class Leave(Protocol):
    """How a reader stops to read: ``Session``. ``reader``: only if it is still the one that receives the request."""

    def abort(self, request_id: str, *, reader: Listener | None) -> None: ...

    def detach(self, request_id: str, *, reader: Listener | None) -> None: ...


class _NoListener:
    def on_accepted(self, accepted: Accepted) -> None: ...

    def on_delta(self, delta: Delta) -> None: ...

    def on_end(self, completion: Completion, error: TriptychError | None) -> None: ...


NO_LISTENER: Listener = _NoListener()  # for a request that goes on without its caller


class Assembly:
    """Joins a request's rows: each token and each character exactly once, in order, however often rows are sent."""

    def __init__(self, request_id: str, *, num_tokens: int = 0, num_chars: int | None = 0, index: int = 0) -> None:
        """``num_tokens`` and ``num_chars``: what the caller already has; None: unknown until the first row."""
        self.request_id = request_id
        self.index = index
        self.num_tokens = num_tokens
        self._is_placed = num_chars is not None
        self._num_misplaced = 0
        self.num_chars = num_chars or 0
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: Logprobs | None = None

    def add(
        self, offset: int, text_offset: int, token_ids: bytes, text: str, logprobs: Any, tps: float | None = None
    ) -> Delta | None:
        """The new part of a row; None if nothing is new. A row that starts beyond what has arrived means a gap.

        Raises:
            LookupError: there is a gap.
            InvalidRequest: the caller resumed with a number of characters that does not match its tokens.
        """
        ids = memoryview(token_ids).cast("i").tolist()
        if not self._is_placed:
            self._place(offset, text_offset)
            if not ids:  # a caller with all tokens also has the text that became final with the last of them
                self.num_chars += len(text)
        known_tokens, known_chars = self.num_tokens - offset, self.num_chars - text_offset
        # A row without tokens may be an end from a sender that does not know the text.
        if known_tokens == 0 and (known_chars < 0 or (known_chars > 0 and ids)):
            raise InvalidRequest(
                f"the first {offset} tokens have {text_offset} characters, not {self.num_chars}", param="num_chars"
            )
        if known_tokens < 0 or known_chars < 0:
            raise LookupError(f"{self.request_id}: a row begins at token {offset}, {self.num_tokens} are here")
        ids, text = ids[known_tokens:], text[known_chars:]
        rows = logprobs[known_tokens:] if logprobs is not None else None
        if not ids and not text:
            return None
        self.num_tokens += len(ids)
        self.num_chars += len(text)
        self._texts.append(text)
        self._token_ids += ids
        if rows is not None:
            self._logprobs = (self._logprobs or []) + rows
        return Delta(text, ids, self.num_tokens, tps, rows, self.index, self.num_chars)

    def _place(self, offset: int, text_offset: int) -> None:
        """Take the number of characters that the caller has from a row that starts behind its tokens."""
        if offset == self.num_tokens:
            self._is_placed, self.num_chars = True, text_offset
            return
        # An earlier row may be meant for a previous reader and still in flight. If it repeats, the answer is shorter.
        self._num_misplaced += offset < self.num_tokens
        if self._num_misplaced > MAX_MISPLACED:
            raise InvalidRequest(
                f"the answer has {offset} tokens so far, {self.num_tokens} were said to be known", param="num_tokens"
            )
        raise LookupError(f"{self.request_id}: a row begins at token {offset}, {self.num_tokens} are known")

    def completion(self, end: Finished | Failed) -> Completion:
        reason = end.finish_reason if isinstance(end, Finished) else "error"
        return Completion(
            self.request_id, "".join(self._texts), self._token_ids, reason, self._logprobs, dict(end.summary)
        )


def told_another(request_id: str) -> InvalidRequest:
    """Why a stream that resumed a request knows nothing of its acceptance."""
    return InvalidRequest(f"request {request_id} was resumed here: who submitted it was told of its acceptance")


def shown(
    stream: object, request_id: str, *, accepted: bool, num_tokens: int, ended: Completion | TriptychError | None
) -> str:
    """The ``repr`` of a stream: which request it is, and how far it has come."""
    tokens = f"{num_tokens} token{'s' * (num_tokens != 1)}"
    if ended is not None:
        state = f"{ended.finish_reason if isinstance(ended, Completion) else ended.code} after {tokens}"
    elif num_tokens:
        state = tokens
    else:
        state = "accepted" if accepted else "sent"
    return f"<{type(stream).__name__} {request_id}, {state}>"


class Stream:
    """A running request: iterate over its deltas, or wait for its ``result``. Thread-safe. A loop that is left early
    ends nothing: call ``abort`` if nobody needs the rest.
    """

    def __init__(self, request_id: str, session: Leave) -> None:
        self._origin = Origin("stream")  # first, so that pickling a stream gives its message
        self.request_id = request_id
        self._session = session
        self._changed = threading.Condition()
        self._deltas: deque[Delta] = deque()
        self._accepted: Accepted | None = None
        self._completion: Completion | None = None
        self._error: TriptychError | None = None
        self._num_tokens = 0
        self._on_done: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        ended = self._error or self._completion
        is_accepted = self._accepted is not None
        return shown(self, self.request_id, accepted=is_accepted, num_tokens=self.num_tokens, ended=ended)

    def __iter__(self) -> Iterator[Delta]:
        """Deltas until the end.

        Raises:
            RequestError: the request failed; the deltas before the failure were yielded.
            PipelineClosed: this is a forked child; what the parent has not received yet, arrives there.
        """
        while True:
            self._check_origin()
            with self._changed:
                self._changed.wait_for(lambda: self._deltas or self._completion)
                if not self._deltas:
                    break
                delta = self._deltas.popleft()
            yield delta
        if self._error is not None:
            raise self._error

    def accepted(self, timeout: float | None = None) -> Accepted:
        """Wait until the service has accepted the request: from then on it is answered, whatever crashes.

        Raises:
            RequestError: it was refused; or it was resumed and has ended, as only who submits a request is told.
            RequestTimeout: no reply within ``timeout`` seconds.
        """
        self._check_origin()
        with self._changed:
            self._wait(lambda: self._accepted or self._completion, timeout)
            if self._accepted is None:
                raise self._error or told_another(self.request_id)
            return self._accepted

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the complete answer.

        Raises:
            RequestError: the request failed; its ``partial`` attribute is what was produced before.
            RequestTimeout: ``timeout`` seconds have passed; the request goes on.
        """
        self.wait(timeout)
        if self._error is not None:
            raise self._error
        assert self._completion is not None, "woken without a completion"
        return self._completion

    def wait(self, timeout: float | None = None) -> None:
        """Return once the request has ended, successfully or not.

        Raises:
            RequestTimeout: ``timeout`` seconds have passed; the request goes on.
        """
        self._check_origin()
        with self._changed:
            self._wait(lambda: self._completion, timeout)

    @property
    def done(self) -> bool:
        """Whether the request has ended, successfully or not."""
        return self._completion is not None

    @property
    def choices(self) -> Sequence[Stream]:
        """One stream per choice of the request; the stream itself if there is only one."""
        return [self]

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer that have arrived, read or not."""
        return self._num_tokens

    def on_done(self, call: Callable[[], None]) -> None:
        """Call once the request has ended, in any way: from the session's thread, or at once. Must not block."""
        with self._changed:
            if self._completion is None:
                self._on_done.append(call)
                return
        call()

    def abort(self) -> None:
        """Request the end. The answer is what was produced so far, with the finish reason "abort"."""
        with suppress(PipelineClosed):  # which ended every request
            self._session.abort(self.request_id, reader=self)  # not another live request with the same id

    def detach(self) -> None:
        """Stop following: the request goes on until it is resumed or its lease ends. No more arrives here, nor does
        an end.
        """
        with suppress(PipelineClosed):  # as above
            self._session.detach(self.request_id, reader=self)

    def on_accepted(self, accepted: Accepted) -> None:
        with self._changed:
            self._accepted = accepted
            self._changed.notify_all()

    def on_delta(self, delta: Delta) -> None:
        with self._changed:
            self._deltas.append(delta)
            self._num_tokens = delta.num_tokens
            self._changed.notify_all()

    def on_end(self, completion: Completion, error: TriptychError | None) -> None:
        with self._changed:
            self._completion, self._error = completion, error
            self._changed.notify_all()
        for call in self._on_done:
            try:
                call()
            except Exception:  # must not affect other callbacks, or the request that this is a choice of
                logger.exception("an on_done callback of request %s raised", self.request_id)

    def _check_origin(self) -> None:
        """Before the lock, which another thread may have held at the time of a fork. An ended request is all here."""
        if self._completion is None:
            self._origin.check()

    def _wait(self, condition: Callable[[], object], timeout: float | None) -> None:
        if not self._changed.wait_for(condition, timeout):
            raise RequestTimeout(f"request {self.request_id}: no answer within {timeout} s")
