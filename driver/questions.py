"""A client's questions about the service and the state of its requests."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from copy import copy
from typing import Any, NamedTuple, TypeAlias

from ..protocol import messages as m
from ..protocol.connection import Connection
from ..protocol.errors import TriptychError

Question: TypeAlias = m.GetInfo | m.GetStats | m.GetStatus | m.GetRequests
Reply: TypeAlias = m.Info | m.Stats | m.Status | m.Requests


class _Asked(NamedTuple):
    question: Question
    futures: deque[Future[Any]]


class Questions:
    """Questions that have no answer yet. Equal questions share one answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._asked: dict[str, _Asked] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, question: Question, future: Future[Any]) -> None:
        self._asked.setdefault(_key(question), _Asked(question, deque())).futures.append(future)
        self._send(question)

    def repeat(self) -> None:
        """Resend all of them that are still awaited: a question or its answer may be lost with a process."""
        for key, asked in list(self._asked.items()):
            waiting = [future for future in asked.futures if not future.cancelled()]
            if waiting:
                self._asked[key] = _Asked(asked.question, deque(waiting))
                self._send(asked.question)
            else:
                del self._asked[key]

    def answer(self, reply: Reply) -> None:
        asked = self._asked.pop(_key(reply), None)
        for future in asked.futures if asked else ():
            if future.set_running_or_notify_cancel():
                future.set_result(reply)

    def fail(self, error: TriptychError) -> None:
        """End each with a copy of the error."""
        for asked in self._asked.values():
            for future in asked.futures:
                if future.set_running_or_notify_cancel():
                    future.set_exception(copy(error))
        self._asked.clear()

    def _send(self, question: Question) -> None:
        self._connection.queue("submit" if isinstance(question, m.GetInfo) else "follow", _key(question), question)


def _key(message: Question | Reply) -> str:
    """The same for a question and its reply."""
    kind = type(message).__name__.removeprefix("Get")
    match message:
        case m.GetStatus() | m.Status():
            return f"{kind} {message.request_id}"
        case m.GetRequests() | m.Requests():
            return f"{kind} {message.limit}"
    return kind
