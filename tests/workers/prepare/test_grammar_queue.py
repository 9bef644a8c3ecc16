"""Clients take turns in the queue for the grammar compiler."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from tests.waiting import eventually
from triptych.protocol.errors import Overloaded, RequestError
from triptych.workers.prepare.grammar_checker import GrammarChecker, Verdict
from triptych.workers.prepare.grammar_queue import MAX_WAITING, MAX_WAITING_OF_ONE, GrammarQueue
from triptych.workers.prepare.structured import Structured


class Slow(GrammarChecker):
    """Compiles nothing until the test allows it."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"), timeout_s=1.0, memory_bytes=1)
        self.began, self.may = threading.Event(), threading.Event()

    def compile(self, structured: Structured) -> Verdict:
        self.began.set()
        self.may.wait(60)
        return Verdict(structured.source)


class Clients:
    def __init__(self) -> None:
        self.checker = Slow()
        self.queue = GrammarQueue(self.checker)
        self.results: list[str | RequestError] = []

    def send(self, owner: bytes, *forms: str) -> None:
        for form in forms:
            self.queue.compile(owner, Structured("regex", form), self.results.append)

    def receive(self, count: int) -> list[str | RequestError]:
        self.checker.may.set()
        eventually(lambda: len(self.results) >= count)
        self.queue.close()
        return self.results


def test_client_with_many_forms_only_delays_itself() -> None:
    clients = Clients()
    clients.send(b"greedy", "a0")
    assert clients.checker.began.wait(60)
    clients.send(b"greedy", "a1", "a2", "a3")
    clients.send(b"modest", "b0", "b1")
    clients.send(b"third", "c0")
    assert clients.receive(7) == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


@pytest.mark.parametrize("num_owners", [1, MAX_WAITING])
def test_queue_is_limited_per_client_and_in_total(num_owners: int) -> None:
    clients = Clients()
    for number in range(2 * MAX_WAITING):
        clients.send(str(number % num_owners).encode(), f"{number}")
    refused = [each for each in clients.results if isinstance(each, Overloaded)]
    limit = MAX_WAITING_OF_ONE if num_owners == 1 else MAX_WAITING
    assert len(refused) == 2 * MAX_WAITING - limit
    assert f"{limit}" in refused[0].message
    assert len(clients.receive(2 * MAX_WAITING)) == 2 * MAX_WAITING


def test_without_a_thread_each_form_is_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    clients = Clients()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        clients.send(b"one", "a", "b")
    assert [str(each) for each in clients.results] == [
        "no thread can be started for the grammar compiler: try again later"
    ] * 2
    clients.send(b"one", "c")
    assert clients.receive(3)[2:] == ["c"]


def test_lack_of_processes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, results = Clients(), list[str | RequestError]()

    def compile_(_: Structured) -> Verdict:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(clients.checker, "compile", compile_)
    clients.queue.compile(b"one", Structured("regex", "a"), results.append)
    eventually(lambda: results)
    clients.queue.close()
    assert isinstance(results[0], Overloaded)
    assert "no process can be started for the grammar compiler, Resource temporarily unavailable" in results[0].message


def test_answered_client_may_queue_again() -> None:
    clients = Clients()
    clients.send(b"one", *(f"{number}" for number in range(MAX_WAITING_OF_ONE)))
    clients.checker.may.set()
    eventually(lambda: len(clients.results) == MAX_WAITING_OF_ONE)
    clients.send(b"one", "more")
    assert clients.receive(MAX_WAITING_OF_ONE + 1)[-1] == "more"
