"""Whose turn it is among those who wait for something that takes one after the other. Pure."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
Owner = bytes | int  # a key's number (see ``Owners``); where it has none, what ``Router.owner`` says


class Turns(Generic[T]):
    """Each client has one of his taken before any has the next, so who sends many waits for himself."""

    def __init__(self) -> None:
        self._waiting: dict[Owner, deque[T]] = {}  # whose turn is next first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, owner: Owner, item: T) -> None:
        self._waiting.setdefault(owner, deque()).append(item)

    def take(self) -> tuple[Owner, T]:
        """What is next; something must wait."""
        owner = next(iter(self._waiting))
        items = self._waiting.pop(owner)
        item = items.popleft()
        if items:
            self._waiting[owner] = items  # behind the others
        return owner, item
