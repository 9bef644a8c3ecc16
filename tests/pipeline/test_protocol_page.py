"""A client that knows only docs/protocol.md: pyzmq and msgpack, and nothing of this package.

The page says what to send and what comes back; these tests do that against a running pipeline. ``Driver`` starts it and
kills its workers, and has no other part in them.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from triptych import Driver

VERSION = 1
SUBMIT, GET_INFO, ACCEPTED, REJECTED, INFO = 1, 2, 3, 4, 5
FOLLOW, ABORT, ACKNOWLEDGE, GET_STATUS, GET_STATS = 10, 11, 12, 13, 14
TEXT, FINISHED, FAILED, STATUS, STATS = 20, 21, 22, 23, 24

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
REPEAT_S, PATIENCE_S = 0.25, 30.0
PROMPT = "What does a raw client need?"
LONG = 2000  # tokens: several windows


class Door:
    """One DEALER socket to one of the two endpoints."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"ipc://{run_dir}/{name}")

    def send(self, tag: int, *fields: Any) -> None:
        self.socket.send(msgpack.packb([tag, VERSION, 0, 0, *fields]))

    def recv(self, timeout_s: float = REPEAT_S) -> list[Any] | None:
        """``[tag, *fields]`` of the next frame, or None."""
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        tag, version, _epoch, _seq, *fields = msgpack.unpackb(self.socket.recv())
        assert version == VERSION
        return [tag, *fields]

    def ask(self, tag: int, *fields: Any) -> list[Any]:
        """The first answer; the question is repeated until there is one."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.send(tag, *fields)
            if (answer := self.recv()) is not None:
                return answer
        raise TimeoutError(f"no answer to a message of tag {tag}")


class RawClient:
    """The state of one request, as the page's section on following has it."""

    def __init__(self, run_dir: Path, request_id: str | None = None) -> None:
        self.submit_door, self.follow_door = Door(run_dir, "submit"), Door(run_dir, "follow")
        self.request_id = request_id or uuid.uuid4().hex
        self.token_ids: list[int] = []
        self.text = ""
        self.num_tokens = self.num_chars = 0  # what is here, counted from the beginning of the answer
        self.rows = 0
        self.end: list[Any] | None = None

    def submit(self, **request: Any) -> list[Any]:
        """The Accepted or Rejected of this id."""
        answer = self.submit_door.ask(SUBMIT, self.request_id, request)
        while answer[1] != self.request_id:
            answer = self.submit_door.ask(SUBMIT, self.request_id, request)
        return answer

    def follow(self, *, until_tokens: int | None = None) -> None:
        """Follow until the terminal message, or until so many tokens are here."""
        deadline = time.monotonic() + PATIENCE_S
        again = True
        while self.end is None and (until_tokens is None or self.num_tokens < until_tokens):
            assert time.monotonic() < deadline, f"{self.num_tokens} tokens after {PATIENCE_S} s"
            self.follow_door.send(FOLLOW, [[self.request_id, self.num_tokens, again]])
            again = False
            while (frame := self.follow_door.recv()) is not None and not again:
                again = not self._take(frame)
                if self.end is not None or frame[0] == TEXT and again is False:
                    break

    def _take(self, frame: list[Any]) -> bool:
        """False if there is a gap."""
        tag, *fields = frame
        if tag == TEXT:
            return all(self._add(*row[1:6]) for row in fields[0] if row[0] == self.request_id)
        if tag in (FINISHED, FAILED) and fields[0] == self.request_id:
            if not self._add(*fields[1:6]):
                return False
            self.end = frame
        return True

    def _add(self, offset: int, text_offset: int, packed: bytes, text: str, _logprobs: Any) -> bool:
        if offset > self.num_tokens or text_offset > self.num_chars:
            return False
        token_ids = list(struct.unpack(f"<{len(packed) // 4}i", packed))[self.num_tokens - offset :]
        text = text[self.num_chars - text_offset :]
        self.token_ids += token_ids
        self.text += text
        self.num_tokens += len(token_ids)
        self.num_chars += len(text)
        self.rows += 1
        return True

    @property
    def finish_reason(self) -> str:
        assert self.end is not None
        assert self.end[0] == FINISHED, self.end
        return str(self.end[7 - 1])


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with Driver("hash-lm", hash_step_ms=0.5) as driver:
        yield driver


@pytest.fixture(scope="module")
def whole(driver: Driver) -> RawClient:
    """An undisturbed answer, to compare the others with."""
    client = RawClient(driver.run_dir)
    assert client.submit(prompt=PROMPT, max_tokens=LONG)[0] == ACCEPTED
    client.follow()
    return client


def test_an_answer_streams_in_rows_and_ends_once(driver: Driver, whole: RawClient) -> None:
    assert whole.finish_reason == "length"
    assert len(whole.token_ids) == LONG
    assert whole.rows > 5
    whole.follow_door.send(FOLLOW, [[whole.request_id, whole.num_tokens, False]])
    assert whole.follow_door.recv() is None, "nothing follows the terminal message"
    assert driver.generate(PROMPT, max_tokens=LONG).text == whole.text
