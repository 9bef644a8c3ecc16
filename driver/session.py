"""The client's side of the protocol, thread-safe: one thread owns the sockets and executes what others order."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ..protocol import messages as m
from ..protocol.connection import Connection
from ..protocol.errors import ConfigError, PipelineClosed, RequestError, TriptychError
from ..protocol.threads import start_thread
from .choices import Whole
from .exchange import Exchange
from .open_request import OpenRequest, check_name, checked_size, copied
from .origin import Origin
from .questions import Question
from .stream import Assembly, Listener

logger = logging.getLogger(__name__)

LISTENING_S = 0.002  # between two checks for open requests
CLOSING_S = 5.0  # how long ``close`` waits for the thread
LAST_ABORTS_S = 1.0  # how long the thread then waits for ACCEPTED of requests to be aborted


class Session:
    """All requests of one client over one ``Connection``. Methods may be called from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._origin = Origin("client")  # first, so that pickling a session gives its message
        self._connection = connection
        self._exchange = Exchange(connection)
        self._orders: deque[Callable[[], object]] = deque()
        self._closing = False
        # Guards the two above, so that a thread that has ended gets no more orders. Reentrant, as a signal handler may
        # give orders too.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="triptych-client", daemon=True)

    def start(self) -> Session:
        """
        Raises:
            ConfigError: no thread can be started.
        """
        try:
            start_thread(self._thread)
        except ConfigError:
            self._connection.close()
            raise
        except BaseException:  # a signal came while the thread was starting: it ends by itself
            self._closing = True
            self._connection.wake()
            raise
        return self

    def submit(
        self,
        request_id: str,
        request: dict[str, Any],
        listener: Listener,
        choices: Sequence[Listener] = (),
        *,
        keep: bool = False,
    ) -> None:
        """Send a request. One with several choices has a listener for each, and one for all of them."""
        message, assembly = m.Submit(request_id, copied(request)), Assembly(request_id)
        if choices:
            whole = Whole(request_id, listener, choices)
            opened = OpenRequest(message, assembly, whole, choices=whole.choices, keep=keep)
        else:
            opened = OpenRequest(message, assembly, listener, keep=keep)
        self._order(lambda: self._exchange.begin(opened))

    def resume(
        self, request_id: str, listener: Listener, *, num_tokens: int, num_chars: int | None, keep: bool = False
    ) -> None:
        """Follow a request that some client submitted, from what this caller has of it."""
        assembly = Assembly(request_id, num_tokens=num_tokens, num_chars=num_chars)
        self._order(lambda: self._exchange.begin(OpenRequest(None, assembly, listener, accepted=True, keep=keep)))

    def forget(self, request_id: str) -> None:
        """The answer is no longer needed: for requests that were kept or that nobody follows."""
        check_name(request_id)
        checked_size(m.Acknowledge([request_id]))
        self._order(lambda: self._exchange.acknowledge(request_id))

    def detach(self, request_id: str, error: TriptychError | None = None, *, reader: Listener | None = None) -> None:
        """Stop following a request, all of its choices, or the choice with this id; its listener receives nothing more
        than ``error``. The request goes on until it is followed again or its lease ends; if it is not accepted yet, it
        is resent until it is.

        ``reader``: only if it is still the listener: another one may have taken over the request.
        """
        if type(request_id) is str:  # anything else names no request
            self._order(lambda: self._exchange.detach(request_id, error, reader))

    def resume_all(
        self, request_id: str, listener: Listener, choices: Sequence[Listener], *, keep: bool = False
    ) -> None:
        """Follow all choices of a request that some client submitted, from their beginning."""
        check_name(request_id)
        whole = Whole(request_id, listener, choices)
        request = OpenRequest(None, Assembly(request_id), whole, accepted=True, choices=whole.choices, keep=keep)
        self._order(lambda: self._exchange.resume_all(request))

    def abort(self, request_id: str, *, reader: Listener | None = None) -> None:
        """End a request, or the choice with this id; ``reader`` as for ``detach``."""
        if type(request_id) is str:  # as above
            self._order(lambda: self._exchange.abort(request_id, reader))

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more orders."""
        return self._closing

    def ask(self, message: Question) -> Future[Any]:
        """The answer to a question: ``Info``, ``Stats``, ``Status`` or ``Requests``."""
        future: Future[Any] = Future()
        self._order(lambda: self._exchange.ask(message, future))
        return future

    def fail(self, error: TriptychError) -> None:
        """End everything open, and everything requested from now on, with this error: the service is gone for good."""
        with suppress(PipelineClosed):  # which ended everything
            self._order(lambda: self._exchange.fail(error))

    def fail_unless_connected(self, error: TriptychError) -> None:
        """The same if one of the two sockets has never been connected."""
        with suppress(PipelineClosed):  # as above
            self._order(lambda: None if self._connection.has_connected else self._exchange.fail(error))

    def wait_for_ends(self, timeout: float) -> None:
        """Wait until no accepted request is open: for callers that know the service has sent its last messages."""
        deadline = time.monotonic() + timeout
        while self._exchange.awaits_ends and time.monotonic() < deadline:
            time.sleep(LISTENING_S)

    def close(self) -> None:
        """End the thread, but not in a forked child. Unanswered requests go on until their leases end.

        Called by a listener, in that thread, it returns before the end.
        """
        if not self._origin.is_here:
            return
        with self._lock:
            if not self._closing:
                self._closing = True
                self._connection.wake()
        # NOTE: if a signal handler calls this, the code it interrupted may hold a lock that the thread needs (this one
        # or a stream's): the thread then ends only after the handler has returned.
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSING_S)

    def _order(self, order: Callable[[], object]) -> None:
        self._origin.check()  # before the lock, which another thread may have held at the time of a fork
        with self._lock:
            if self._closing:
                raise PipelineClosed("the client is closed")
            self._orders.append(order)
            self._connection.wake()

    # -- everything below runs in the session's thread

    def _run(self) -> None:
        end: TriptychError = PipelineClosed("the client was closed before the answer came")
        try:
            while not self._closing:
                self.turn()
            self._abort_sent_requests()
        except Exception as error:
            logger.exception("the client's thread failed")
            end = RequestError(f"the client's thread failed: {error!r}")
        with self._lock:
            self._closing = True
        self._take_orders()  # orders given just before the close end with the rest
        self._exchange.end_all(end)
        self._connection.close()

    def _abort_sent_requests(self) -> None:
        """Abort requests in flight that are not wanted any more: they would go on until their leases end."""
        self._take_orders()
        unsent = self._connection.drop_requests()
        sent = [name for name in self._exchange.requests if ("submit", name) not in unsent]
        deadline = time.monotonic() + LAST_ABORTS_S
        while self._exchange.awaits_aborts(sent) and (left_s := deadline - time.monotonic()) > 0:
            self._exchange.receive(self._connection.wait(left_s))

    def _take_orders(self) -> None:
        while self._orders:
            self._orders.popleft()()

    def turn(self) -> None:
        """Wait for messages or for the next repetition, and process them."""
        self._take_orders()
        frames = self._connection.wait(self._exchange.resend_due())
        self._take_orders()  # given before these frames arrived: a detached request must not receive them
        self._exchange.receive(frames)
