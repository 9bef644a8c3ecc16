"""Serves the clients that wait for a serial resource in turn. Pure."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
Owner = bytes | int  # a key's number (see ``Owners``), or without keys the result of ``Router.owner``


class Turns(Generic[T]):
    """Round robin over clients: one that queues many items only waits longer for its own."""

    def __init__(self) -> None:
        self._waiting: dict[Owner, deque[T]] = {}  # next owner first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, owner: Owner, item: T) -> None:
        self._waiting.setdefault(owner, deque()).append(item)

    def take(self) -> tuple[Owner, T]:
        """The next item; there must be one."""
        owner = next(iter(self._waiting))
        items = self._waiting.pop(owner)
        item = items.popleft()
        if items:
            self._waiting[owner] = items  # behind the others
        return owner, item
