"""Lets other processes of the same user control a driver: a Unix socket in the run directory.

One line of JSON, ``{"ask": "health"}`` or ``{"ask": "restart", "role": "execute", "model": null}``, and one line back,
``{"ok": ...}`` or ``{"error": message}``. Requests never use this socket.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..protocol.errors import ConfigError, TriptychError
from ..protocol.private_file import remove_if_possible
from ..protocol.run_dir import control_path
from ..protocol.threads import start_thread
from .flag import Flag

logger = logging.getLogger(__name__)

MAX_QUESTION_BYTES = 8192
MAX_ANSWER_BYTES = 1 << 20  # may include a worker's last log lines, with every character escaped as six bytes
QUESTION_S = 2.0  # within which a peer must send its question
ANSWER_S = 600.0  # loading a model takes time
MAX_QUESTIONS = 16  # answered concurrently
RETRY_S = 0.5  # after a failed accept
Handlers = dict[str, Callable[..., Any]]


class ControlServer:
    """Answers questions until closed, each in its own thread: some take as long as loading a model."""

    def __init__(self, run_dir: Path, handlers: Handlers) -> None:
        self._path = control_path(run_dir)
        self._handlers = handlers
        self._path.unlink(missing_ok=True)  # left by a killed driver; we hold the run directory's lock
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(self._path))
        self._path.chmod(0o600)
        self._socket.listen(8)
        self._closing = Flag()
        self._answering: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, name="triptych-control", daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:  # no thread available, or a signal while it was starting: then it ends by itself
            self._shut()
            raise

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closing.wait(RETRY_S):
                    return
                logger.warning("cannot accept control connections: %s", error.strerror)  # e.g. out of descriptors
                continue
            self._answering = [thread for thread in self._answering if thread.is_alive()]
            try:
                if len(self._answering) >= MAX_QUESTIONS:
                    raise RuntimeError("too many questions at once")
                thread = threading.Thread(target=self._serve, args=[connection], name="triptych-answer", daemon=True)
                thread.start()
            except RuntimeError:  # or no more threads: answer it here, while the others wait
                self._serve(connection)
            else:
                self._answering.append(thread)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(QUESTION_S)
            # A peer that has hung up must not end this process, whatever the host program does with SIGPIPE.
            connection.sendall(json.dumps(self._answer(connection)).encode() + b"\n", socket.MSG_NOSIGNAL)

    def _answer(self, connection: socket.socket) -> dict[str, Any]:
        if (user := _user_of(connection)) not in (os.getuid(), 0):
            return {"error": f"user {user} may not control this driver"}
        try:
            return {"ok": self._asked_for(connection)()}
        except TriptychError as error:
            return {"error": error.message}
        except Exception as error:  # a question must not end the thread that answers it
            logger.exception("a question could not be answered")
            return {"error": f"the question cannot be answered: {error!r:.200}"}

    def _asked_for(self, connection: socket.socket) -> Callable[[], Any]:
        """The call that answers the peer's question.

        Raises:
            ConfigError: no valid question arrives.
        """
        try:
            line = _read_line(connection, MAX_QUESTION_BYTES)
        except TimeoutError as error:
            raise ConfigError(f"no question arrived within {QUESTION_S:g} s") from error
        try:
            question = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"a question is a line of JSON, got {line!r:.100}: {error}") from error
        if not isinstance(question, dict) or not isinstance(name := question.pop("ask", None), str):
            raise ConfigError(f'a question is a map with "ask", got {line!r:.100}')
        if (handler := self._handlers.get(name)) is None:
            raise ConfigError(f"unknown question {name!r:.100}, known are: {', '.join(sorted(self._handlers))}")
        try:
            inspect.signature(handler).bind(**question)
        except TypeError as error:
            raise ConfigError(f"wrong fields for {name}: {error}") from error
        return partial(handler, **question)

    def close(self) -> None:
        """Returns once every question received is answered; long-running ones notice a stop on the board."""
        self._shut()
        self._thread.join()
        for thread in self._answering:
            thread.join()

    def _shut(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        remove_if_possible(self._path)


def ask(run_dir: Path, question: str, **fields: Any) -> Any:
    """The answer of the driver of ``run_dir``.

    Raises:
        ConfigError: no driver runs there, it does not answer in time, or it reports an error.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(str(control_path(run_dir)))
            connection.sendall(json.dumps({"ask": question, **fields}).encode() + b"\n")
            answer = json.loads(_read_line(connection, MAX_ANSWER_BYTES))
        except TimeoutError as error:
            raise ConfigError(
                f"the driver of {run_dir} did not answer within {ANSWER_S:g} s", param="connect"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"no driver responds in {run_dir}: {error}", param="connect") from error
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["ok"]


def _read_line(connection: socket.socket, max_bytes: int) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) <= max_bytes:
        part = connection.recv(max_bytes)
        if not part:
            break
        line += part
    if len(line) > max_bytes:
        raise ConfigError(f"a question or an answer has more than {max_bytes} bytes")
    return line


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)
