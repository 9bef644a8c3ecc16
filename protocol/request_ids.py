"""Ids of requests and of their sequences, and the seeds that these are sampled with."""

from __future__ import annotations

import re

from .errors import InvalidRequest

MAX_ID_CHARS = 64
SEPARATOR = " "  # never part of a request id, so no client can choose the id of another request's choice

_MAX_SEED = 2**63 - 1
_VALID_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}")


def check_request_id(request_id: str) -> None:
    """
    Raises:
        InvalidRequest: the id is not 1 to 64 printable ASCII characters without spaces.
    """
    if not _VALID_ID.fullmatch(request_id):
        raise InvalidRequest(
            f"request_id must be 1 to {MAX_ID_CHARS} printable ASCII characters without spaces, got"
            f" {request_id!r:.100} of {len(request_id)} characters",
            param="request_id",
        )


def member_id(request_id: str, index: int, size: int) -> str:
    """The id of sequence ``index`` of a request of ``size`` sequences; the request's own id if there is only one.

    A client follows choice ``index`` by the same id, with the number of choices as ``size``.
    """
    return request_id if size == 1 else f"{request_id}{SEPARATOR}{index}"


def request_of(member: str) -> str:
    """The id of the request that a sequence or choice belongs to."""
    return member.partition(SEPARATOR)[0]


def member_seed(seed: int, index: int) -> int:
    """The seed of sequence ``index``: a single-sequence request with this seed gives the same answer."""
    return (seed + index) & _MAX_SEED
