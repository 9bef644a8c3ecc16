"""What the session keeps of a request that is open, and how large its frame is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..protocol import messages as m
from ..protocol.codec import MAX_DEPTH, decode_public, encode
from ..protocol.errors import InvalidRequest, TriptychError
from ..protocol.groups import check_request_id
from .stream import Assembly, Listener

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenRequest:
    """One request of this client, from SUBMIT to the acknowledgement of its end."""

    message: m.Submit | None  # None for one that is resumed
    assembly: Assembly
    listener: Listener
    num_bytes: int = 0  # of the SUBMIT's frame
    accepted: bool = False
    followed_tokens: int = 0  # the offset of the last FOLLOW
    again: bool = True  # ask for everything after the offset once more
    aborting: bool = False
    keep: bool = False  # the end is not acknowledged, so that somebody can ask for the answer again
    choices: Sequence[Listener] = ()  # of a request with several choices, which are followed instead of it
    aborted_choices: set[str] = field(default_factory=set)  # before they were there
    whole: OpenRequest | None = None  # of a choice: the request that it is one of
    begun_s: float = 0.0  # time.monotonic() of its first SUBMIT
    num_said_anew: int = 0  # SUBMITs after it had been accepted

    def check(self) -> None:
        """Before anything of it is sent; its id is a text.

        Raises:
            RequestError: the service could not take it, or not say whose it is.
        """
        request_id = self.assembly.request_id
        _check_start(self.assembly)
        self.num_bytes = checked_size(self.message or m.GetStatus(request_id))
        if self.message is not None:
            check_request_id(request_id)

    def may_begin_anew(self, now: float) -> bool:
        """Whether its SUBMIT can be said after it was accepted: if its caller's time is not up."""
        if self.message is None:
            return False
        limits = [self.message.request.get(name) for name in ("deadline_ms", "max_queue_ms")]
        return all(limit is None or now < self.begun_s + limit / 1e3 for limit in limits)

    @property
    def is_untouched(self) -> bool:
        """Whether its caller has nothing of the answer yet, and has not given it up."""
        return not (self.assembly.num_tokens or self.assembly.num_chars or self.aborting)

    def end(self, end: m.Finished | m.Failed, error: TriptychError | None) -> None:
        """Tell the listener how it ended."""
        completion = self.assembly.completion(end)
        if error is not None:
            error.partial = completion
        self.tell(self.listener.on_end, completion, error)

    def fail(self, error: TriptychError) -> None:
        """End it here, for a reason that no terminal message of the service brought."""
        request_id = self.assembly.request_id
        self.end(m.Failed(request_id, 0, 0, b"", "", None, error.code, error.message, {}), error)

    def tell(self, call: Callable[..., None], *what: Any) -> None:
        try:
            call(*what)
        except Exception:  # a caller's callback must not stop the other requests
            logger.exception("the listener of request %s raised", self.assembly.request_id)


class LastIds:
    """The ids that were added last."""

    def __init__(self, max_size: int = 1 << 12) -> None:
        self._max_size = max_size
        self._ids: dict[str, None] = {}  # oldest first

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str) -> None:
        self._ids[request_id] = None
        if len(self._ids) > self._max_size:
            del self._ids[next(iter(self._ids))]

    def discard(self, request_id: str) -> None:
        self._ids.pop(request_id, None)


def copied(value: Any, depth: int = MAX_DEPTH) -> Any:
    """The value, in lists and maps that its caller has not got: a request is said until it is answered, and each time
    the same. What is deeper than the service takes is left as it is, to be refused.
    """
    if depth and isinstance(value, dict):
        return {key: copied(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [copied(item, depth - 1) for item in value]
    return value


def check_name(request_id: str) -> None:
    """
    Raises:
        InvalidRequest: it is no text, so it cannot be the id of a request, or of a choice.
    """
    if type(request_id) is not str:
        raise InvalidRequest(f"request_id must be a str, got {request_id!r:.100}", param="request_id")


def _check_start(assembly: Assembly) -> None:
    """
    Raises:
        InvalidRequest: a FOLLOW cannot say so. The service would not read those beside it either.
    """
    for name, value in (("num_tokens", assembly.num_tokens), ("num_chars", assembly.num_chars)):
        if type(value) is not int or not 0 <= value < 2**63:
            raise InvalidRequest(f"{name} must be an int, 0 or more, got {value!r:.100}", param=name)


def checked_size(message: Any) -> int:
    """Bytes of the message's frame, at most.

    Raises:
        RequestError: the service could not read it, and therefore not say whose it was.
    """
    try:
        frame = encode(message, seq=2**64 - 1)
    except UnicodeEncodeError as error:
        text = f"the request cannot be encoded: {error.object[error.start]!r} is half a surrogate pair and no character"
        raise InvalidRequest(text) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"the request cannot be encoded: {error}") from error
    decode_public(frame, max_bytes=len(frame))
    return len(frame)
