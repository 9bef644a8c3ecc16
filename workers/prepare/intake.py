"""Which request ids are known, and how to answer a request that is sent again."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...protocol.codec import pack
from ...protocol.errors import DuplicateId, InvalidRequest
from ...protocol.groups import member_id
from ...protocol.journal.layout import MAX_ID_BYTES
from ...protocol.messages import Accepted
from ...protocol.reasoning import Reasoning
from ...protocol.record import is_repeat
from ...protocol.record_key import Key
from .request import GenerationRequest
from .turns import Owner

INLINE_BYTES = 16 << 10  # prompts up to this size are tokenized at once, larger ones and chats in a separate thread


@dataclass(slots=True)
class Intake:
    """One request on its way through this process."""

    peer: bytes
    owner: Owner  # whose quota it counts towards
    request_id: str
    digest: int
    mark: int  # see ``mark_of``
    num_bytes: int  # of its frame
    request: GenerationRequest
    received_ns: int
    grammar: str = ""  # compiled from request.structured
    reasoning: Reasoning | None = None  # what may come before it
    continues_prompt: bool = False  # see RequestRecord
    tokenize_start_ns: int = 0
    tokenize_end_ns: int = 0

    @property
    def is_long(self) -> bool:
        """Whether tokenizing it may take long."""
        return _takes_long(self.num_bytes, is_chat=self.request.messages is not None)

    def time_after(self, limit_ms: float | None) -> int:
        """This long after the receipt, ns of the journal's clock; 0 without a limit."""
        return 0 if limit_ms is None else self.received_ns + int(limit_ms * 1e6)


def num_waiting_bytes(request: Mapping[str, Any], num_bytes: int) -> int:
    """Bytes of a SUBMIT that will wait for the compiler or the tokenizer; 0 if it is tokenized at once.

    Derived from the undecoded map: whether there is room is checked before any work is done for the request.
    """
    is_long = _takes_long(num_bytes, is_chat=request.get("messages") is not None)
    return num_bytes if is_long or request.get("structured") is not None else 0


def _takes_long(num_bytes: int, *, is_chat: bool) -> bool:
    """Chats always count: a chat template is a program that may run for any time."""
    return num_bytes > INLINE_BYTES or is_chat


def check_member_ids(request_id: str, size: int) -> None:
    """
    Raises:
        InvalidRequest: with a suffix for each of ``size`` sequences, the id is too long.
    """
    num_more = len(member_id(request_id, size - 1, size)) - MAX_ID_BYTES
    if num_more > 0:
        raise InvalidRequest(
            f"request_id has {len(request_id)} characters, the limit for {size} sequences is"
            f" {len(request_id) - num_more}",
            param="request_id",
        )


def digest_of(request: Any) -> int:
    """CRC-32 of a request, independent of the order of its fields."""
    return zlib.crc32(pack(_sorted(request)))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return [[key, _sorted(value[key])] for key in sorted(value, key=repr)]
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [_sorted(item) for item in value]
    return value


def answered_already(request_id: str) -> DuplicateId:
    return DuplicateId(f"the request {request_id!r} has already been answered", param="request_id")


class Known(NamedTuple):
    """What this process knows of a live request."""

    mark: int  # see ``mark_of``
    accepted: Accepted | None = None  # the reply it got; None while it is being tokenized
    key: Key = (0, 0)  # of its last record


class KnownIds:
    """Live ids with the replies they got, and up to ``max_past`` past ids.

    Requests with the same id are told apart by their marks: the same request sent again, by someone who may access it,
    gets the same reply; a different one is refused while the first is live.
    """

    def __init__(self, past: Iterable[tuple[str, int]], *, max_past: int) -> None:
        self._live: dict[str, Known] = {}
        self._past: OrderedDict[str, int] = OrderedDict(past)
        self._max_past = max_past

    def seen(self, request_id: str, mark: int) -> Known | None:
        """This very request, if it is already live.

        Raises:
            DuplicateId: another request with this id is live, or this one was answered and acknowledged.
        """
        if (known := self._live.get(request_id)) is not None:
            if not is_repeat(mark, known.mark):
                raise DuplicateId(f"another request with the id {request_id!r} is live", param="request_id")
            return known
        past = self._past.get(request_id)
        if past is not None and is_repeat(mark, past):
            raise answered_already(request_id)
        return None

    def begin(self, request_id: str, mark: int) -> None:
        self._live[request_id] = Known(mark)

    def accept(self, accepted: Accepted, mark: int, key: Key) -> None:
        """``key``: that of its last record."""
        self._live[accepted.request_id] = Known(mark, accepted, key)

    def refuse(self, request_id: str) -> None:
        """The request was refused; no effect if it has been accepted before."""
        if request_id in self._live and self._live[request_id].accepted is None:
            del self._live[request_id]

    def forget(self, request_id: str, *, was_read: bool) -> None:
        """The record is gone. If its answer was never read, sending the request again starts a new one: its client may
        never have learned that it had been accepted.
        """
        known = self._live.pop(request_id, None)
        if known is not None and was_read:
            self._past[request_id] = known.mark
            self._past.move_to_end(request_id)
            if len(self._past) > self._max_past:
                self._past.popitem(last=False)
