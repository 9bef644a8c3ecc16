"""A client's state of an open request, and the size of its frame."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..protocol import messages as m
from ..protocol.codec import MAX_DEPTH, decode_public, encode
from ..protocol.errors import InvalidRequest, TriptychError
from ..protocol.request_ids import check_request_id
from .copies import Copies
from .stream import Assembly, Listener

logger = logging.getLogger(__name__)

MAX_LAST_IDS = 1 << 12


@dataclass(slots=True)
class OpenRequest:
    """One request of this client, from SUBMIT to the acknowledgement of its end."""

    message: m.Submit | None  # None if it is resumed
    assembly: Assembly
    listener: Listener
    num_bytes: int = 0  # of the SUBMIT's frame
    accepted: bool = False
    followed_tokens: int = 0  # the offset of the last FOLLOW
    again: bool = True  # request everything after the offset once more
    aborting: bool = False
    keep: bool = False  # do not acknowledge the end, so that the answer can be requested again
    choices: Sequence[Listener] = ()  # listeners of its choices, which are followed instead of it
    aborted_choices: set[str] = field(default_factory=set)  # choices aborted before they existed
    whole: OpenRequest | None = None  # for a choice: the request it belongs to
    begun_s: float = 0.0  # time.monotonic() of its first SUBMIT
    num_resubmissions: int = 0  # SUBMITs after it had been accepted
    copies: Copies = field(default_factory=Copies)  # of a large SUBMIT

    def check(self) -> None:
        """Validate it before anything is sent; its id is known to be a str.

        Raises:
            RequestError: the service would be unable to accept it, or to reply to it.
        """
        request_id = self.assembly.request_id
        _check_start(self.assembly)
        self.num_bytes = checked_size(self.message or m.GetStatus(request_id))
        if self.message is not None:
            check_request_id(request_id)

    def take_over(self, earlier: OpenRequest) -> None:
        """Go on from one that was detached before it was accepted. One that is resumed has been aborted if that was."""
        self.accepted = False
        if self.message is None:
            self.message = earlier.message
            self.aborting, self.aborted_choices = earlier.aborting, earlier.aborted_choices

    def may_resubmit(self, now: float) -> bool:
        """Whether it may be submitted once more after it was accepted: only while its own deadlines have not passed."""
        if self.message is None:
            return False
        limits = [self.message.request.get(name) for name in ("deadline_ms", "max_queue_ms")]
        return all(limit is None or now < self.begun_s + limit / 1e3 for limit in limits)

    @property
    def is_untouched(self) -> bool:
        """Whether its caller has received nothing of the answer yet and has not aborted it."""
        return not (self.assembly.num_tokens or self.assembly.num_chars or self.aborting)

    def end(self, end: m.Finished | m.Failed, error: TriptychError | None) -> None:
        """Tell the listener how it ended."""
        completion = self.assembly.completion(end)
        if error is not None:
            error.partial = completion
        self.notify(self.listener.on_end, completion, error)

    def fail(self, error: TriptychError) -> None:
        """End it with a local error, without a terminal message from the service."""
        request_id = self.assembly.request_id
        self.end(m.Failed(request_id, 0, 0, b"", "", None, error.code, error.message, {}), error)

    def notify(self, call: Callable[..., None], *what: Any) -> None:
        try:
            call(*what)
        except Exception:  # a caller's callback must not stop the other requests
            logger.exception("the listener of request %s raised", self.assembly.request_id)


class LastIds:
    """The ``MAX_LAST_IDS`` most recently added ids."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}  # oldest first

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str) -> None:
        self._ids[request_id] = None
        if len(self._ids) > MAX_LAST_IDS:
            del self._ids[next(iter(self._ids))]

    def discard(self, request_id: str) -> None:
        self._ids.pop(request_id, None)


def copied(value: Any, depth: int = MAX_DEPTH) -> Any:
    """A copy, independent of the caller's later changes: a request is resent until answered, always the same. What is
    nested deeper than the service accepts is left as it is, to be refused.
    """
    if depth and isinstance(value, dict):
        return {key: copied(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [copied(item, depth - 1) for item in value]
    return value


def check_name(request_id: str) -> None:
    """
    Raises:
        InvalidRequest: it is not a str, so it cannot be the id of a request or a choice.
    """
    if type(request_id) is not str:
        raise InvalidRequest(f"request_id must be a str, got {request_id!r:.100}", param="request_id")


def _check_start(assembly: Assembly) -> None:
    """
    Raises:
        InvalidRequest: a FOLLOW cannot encode it, and would be rejected along with its other entries.
    """
    for name, value in (("num_tokens", assembly.num_tokens), ("num_chars", assembly.num_chars)):
        if type(value) is not int or not 0 <= value < 2**63:
            raise InvalidRequest(f"{name} must be an int, 0 or more, got {value!r:.100}", param=name)


def checked_size(message: Any) -> int:
    """The size of the message's frame.

    Raises:
        RequestError: the service would be unable to decode it, and so to reply to it.
    """
    try:
        frame = encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        name = _unencodable(message)
        reason: object = error
        if isinstance(error, UnicodeEncodeError):
            reason = f"{error.object[error.start]!r} is a lone surrogate, not a character"
        raise InvalidRequest(f"{name or 'the request'} cannot be encoded: {reason}", param=name) from error
    decode_public(frame, max_bytes=len(frame))
    return len(frame)


def _unencodable(message: Any) -> str | None:
    """The field of a request that cannot be encoded."""
    for name, value in message.request.items() if isinstance(message, m.Submit) else ():
        try:
            encode(m.Submit("", {name: value}))
        except (TypeError, ValueError, OverflowError):
            return str(name)
    return None
