"""Which request ids are known, and how to answer a request that is sent again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from ...protocol.errors import DuplicateId
from ...protocol.messages import Accepted
from ...protocol.record import is_repeat
from ...protocol.record_key import Key


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
