"""Forms waiting for the grammar compiler, which may take seconds for each."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ...protocol.errors import Overloaded, RequestError
from .grammar_checker import GrammarChecker
from .structured import Structured
from .turns import Owner, Turns

logger = logging.getLogger(__name__)

MAX_WAITING = 256  # forms waiting or being compiled; each may take grammar_timeout_s
MAX_WAITING_OF_ONE = MAX_WAITING // 2  # of one client

Done = Callable[[str | RequestError], None]


class GrammarQueue:
    """A checker with a thread of its own, which serves clients in turn."""

    def __init__(self, checker: GrammarChecker) -> None:
        self._checker = checker
        self._lock = threading.Lock()  # guards the two below
        self._waiting: Turns[tuple[Structured, Done]] = Turns()
        self._num_forms: Counter[Owner] = Counter()  # by owner: waiting or being compiled
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compiler")
        self._has_thread = False

    def compile(self, owner: Owner, structured: Structured, done: Done) -> None:
        """Calls ``done`` once with the grammar or an error: at once if it is cached, else from the thread."""
        if (verdict := self._checker.known(structured)) is not None:
            done(verdict.result)
        elif (refused := self._start() or self._add(owner, structured, done)) is not None:
            done(refused)
        else:
            self._thread.submit(self._compile_next)

    def _start(self) -> Overloaded | None:
        """Before anything waits for the thread: what is refused must not be compiled later, and answered again."""
        try:
            if not self._has_thread:
                self._thread.submit(lambda: None)
        except RuntimeError:
            return Overloaded("no thread can be started for the grammar compiler: try again later")
        self._has_thread = True
        return None

    def _add(self, owner: Owner, structured: Structured, done: Done) -> Overloaded | None:
        with self._lock:
            if self._num_forms.total() >= MAX_WAITING:
                return Overloaded(f"{MAX_WAITING} requests wait for the grammar compiler, which is the limit")
            if self._num_forms[owner] >= MAX_WAITING_OF_ONE:
                return Overloaded(
                    f"{MAX_WAITING_OF_ONE} requests of this client wait for the grammar compiler, which is the limit"
                )
            self._num_forms[owner] += 1
            self._waiting.add(owner, (structured, done))
        return None

    def close(self) -> None:
        """Drops what is waiting. The compiler process ends with the thread, or with this process."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile_next(self) -> None:
        with self._lock:
            owner, (structured, done) = self._waiting.take()
        result = self._compile(structured)
        with self._lock:
            self._num_forms[owner] -= 1
            if not self._num_forms[owner]:
                del self._num_forms[owner]
        done(result)

    def _compile(self, structured: Structured) -> str | RequestError:
        try:
            return self._checker.compile(structured).result
        except OSError as error:
            logger.warning("no process can be started for the grammar compiler: %s", error.strerror)
            return Overloaded(f"no process can be started for the grammar compiler, {error.strerror}: try again later")
        except Exception as error:  # the request must be answered
            logger.exception("a grammar could not be compiled")
            return RequestError(f"the grammar could not be compiled: {type(error).__name__}")
