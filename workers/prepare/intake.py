"""One request on its way through prepare, and what is determined before any work is done for it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...protocol.codec import pack
from ...protocol.errors import InvalidRequest
from ...protocol.journal.layout import MAX_ID_BYTES
from ...protocol.reasoning import Reasoning
from ...protocol.request_ids import member_id
from .request import GenerationRequest
from .turns import Owner

INLINE_BYTES = 16 << 10  # prompts up to this size are tokenized at once, larger ones and chats in a separate thread


@dataclass(slots=True)
class Intake:
    """What is known of the request so far."""

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
