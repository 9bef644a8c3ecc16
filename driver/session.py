"""The client's side of the protocol: one thread that owns the sockets and carries every request to its end.

A request is resent until it is answered, followed until it ends, and resumed where it stood when a worker came back:
all of it by sending the same three messages again. Nothing here needs torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from typing import Any

from ..protocol import messages as m
from ..protocol.channels import Connection
from ..protocol.errors import DuplicateId, InvalidRequest, PipelineClosed, RequestError, TriptychError, from_wire
from ..protocol.groups import request_of
from .choices import Whole, choice_ids, is_read_by
from .open_request import LastIds, OpenRequest, check_name, checked_size, copied
from .origin import Origin
from .questions import Question, Questions
from .stream import NOBODY, Assembly, Listener

logger = logging.getLogger(__name__)

REPEAT_S = 0.25  # what was not answered is sent again so often; FOLLOW also keeps the lease
LISTENING_S = 0.002  # between two looks at what is open
ACKNOWLEDGE_TOKENS = 64  # a FOLLOW at least every so many tokens, well within the server's window
SURE_BYTES = 1 << 10  # a frame that every service takes, whatever its max_frame_bytes


class Session:
    """All requests of one client over one ``Connection``. Methods may be called from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._requests: dict[str, OpenRequest] = {}
        self._choices: dict[str, list[str]] = {}  # request id -> what its choices are followed by
        # Of these the service may say something again.
        self._delivered, self._refused = LastIds(), LastIds()
        self._changed: dict[str, OpenRequest] = {}  # whose FOLLOW may be due; nobody looks through all that is open
        self._questions = Questions(connection)
        self._orders: deque[Callable[[], object]] = deque()
        self._failure: TriptychError | None = None  # of the service, for good
        self._closing = False
        self._lock = threading.Lock()  # of the two above: nothing is given to a thread that has ended
        self._max_frame_bytes: int | None = None  # of the service, once it said so
        self._next_repeat = 0.0
        self._origin = Origin("client")
        self._thread = threading.Thread(target=self._run, name="triptych-client", daemon=True)

    def start(self) -> Session:
        self._thread.start()
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
        """Send a request. One with several choices has a listener for each, and one that hears of all."""
        message, assembly = m.Submit(request_id, copied(request)), Assembly(request_id)
        if choices:
            whole = Whole(request_id, listener, choices)
            self._order(lambda: self._begin(OpenRequest(message, assembly, whole, choices=whole.choices, keep=keep)))
        else:
            self._order(lambda: self._begin(OpenRequest(message, assembly, listener, keep=keep)))

    def resume(
        self, request_id: str, listener: Listener, *, num_tokens: int, num_chars: int | None, keep: bool = False
    ) -> None:
        """Follow a request that some client submitted, from what this caller has of it."""
        assembly = Assembly(request_id, num_tokens=num_tokens, num_chars=num_chars)
        self._order(lambda: self._begin(OpenRequest(None, assembly, listener, accepted=True, keep=keep)))

    def forget(self, request_id: str) -> None:
        """The answer is not needed any more: for one that was kept, or that nobody reads."""
        check_name(request_id)
        checked_size(m.Acknowledge([request_id]))
        self._order(lambda: self._acknowledge(request_id))

    def let_go(self, request_id: str, error: TriptychError | None = None, *, reader: Listener | None = None) -> None:
        """Stop following a request, all of its choices, or the choice of this id; the listener hears no more than
        ``error``. The request goes on until somebody follows it again, or its lease ends; one that is not accepted yet
        is said until it is.

        ``reader``: only if it is still the one who reads. Somebody else may have taken the request over.
        """

        def order() -> None:
            for wire_id in self._choices.get(request_id, [request_id]):
                request = self._requests.get(wire_id)
                if request is not None and (reader is None or is_read_by(request.listener, reader)):
                    if request.accepted:
                        self._drop(wire_id)
                    else:
                        self._requests[wire_id] = replace(request, listener=NOBODY)
                    if error is not None:
                        request.fail(copy(error))

        if type(request_id) is str:  # what is none names nobody
            self._order(order)

    def resume_all(
        self, request_id: str, listener: Listener, choices: Sequence[Listener], *, keep: bool = False
    ) -> None:
        """Follow all choices of a request that some client submitted, from their beginning."""
        check_name(request_id)
        whole = Whole(request_id, listener, choices)
        request = OpenRequest(None, Assembly(request_id), whole, accepted=True, choices=whole.choices, keep=keep)
        self._order(lambda: self._follow_choices(request))

    def abort(self, request_id: str, *, reader: Listener | None = None) -> None:
        """End a request, or the choice of this id; ``reader`` as for ``let_go``."""
        if type(request_id) is str:  # as above
            self._order(lambda: self._abort(request_id, reader))

    def ask(self, message: Question) -> Future[Any]:
        """The answer to a question: ``Info``, ``Stats``, ``Status`` or ``Requests``."""
        future: Future[Any] = Future()
        self._order(lambda: self._ask(message, future))
        return future

    def fail(self, error: TriptychError) -> None:
        """End everything that is open with this error, and what is asked for from now on: the service will not come
        back.
        """

        def order() -> None:
            self._failure = error
            self._fail_all(error)

        self._order(order)

    def hear_the_ends(self, timeout: float) -> None:
        """Wait until no accepted request is open: for whoever knows that the service has said its last words."""
        deadline = time.monotonic() + timeout
        while any(request.accepted for request in list(self._requests.values())) and time.monotonic() < deadline:
            time.sleep(LISTENING_S)

    def close(self) -> None:
        """End the thread, but not in a forked child. What is not answered goes on until its lease ends."""
        if not self._origin.is_here:
            return
        with self._lock:
            if not self._closing:
                self._closing = True
                self._connection.wake()
        self._thread.join()

    def _order(self, order: Callable[[], object]) -> None:
        self._origin.check()  # before the lock, which another thread may have held at the fork
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
        except Exception as error:
            logger.exception("the client's thread failed")
            end = RequestError(f"the client's thread failed: {error!r}")
        with self._lock:
            self._closing = True
        self._take_orders()  # what was given just before the close ends with the rest
        self._fail_all(end)
        self._connection.close()

    def _take_orders(self) -> None:
        while self._orders:
            self._orders.popleft()()

    def turn(self) -> None:
        """Wait for what is due or arrives, and do it."""
        self._take_orders()
        now = time.monotonic()
        if now >= self._next_repeat:
            self._repeat()
            self._next_repeat = now + REPEAT_S
        busy = self._requests or self._questions
        frames = self._connection.wait(self._next_repeat - now if busy else 3600.0)
        self._take_orders()  # given before these came: what is let go hears none of them
        for frame in frames:
            self._hear(frame.message)
        changed, self._changed = self._changed, {}
        self._follow(r for i, r in changed.items() if self._requests.get(i) is r and self._follow_is_due(r))

    def _begin(self, request: OpenRequest) -> None:
        request_id = request.assembly.request_id
        try:
            check_name(request_id)
            earlier = self._requests.get(request_id)
            if earlier is not None and earlier.listener is NOBODY:  # somebody comes for it before it is accepted
                request.message, request.accepted = request.message or earlier.message, False
                earlier = None
            if earlier is not None or request_id in self._choices:
                raise DuplicateId(f"this client has a live request {request_id!r} already", param="request_id")
            request.check()
            self._check_service()
        except TriptychError as error:
            request.fail(error)
            return
        self._requests[request_id] = request
        self._delivered.discard(request_id)
        self._refused.discard(request_id)
        self._changed[request_id] = request
        self._send_submit(request)
        self._next_repeat = min(self._next_repeat, time.monotonic() + REPEAT_S)

    def _check_service(self) -> None:
        if self._failure is not None:
            raise copy(self._failure)

    def _send_submit(self, request: OpenRequest) -> None:
        """Queue the SUBMIT; for a large frame ask for the limit first: the service cuts off who sends one over it."""
        limit = self._max_frame_bytes
        if request.message is None or request.accepted:
            return
        if request.num_bytes <= (limit or SURE_BYTES):
            self._connection.queue("submit", request.message.request_id, request.message)
        elif limit is None:
            self._connection.queue("submit", "Info", m.GetInfo())
        else:
            text = f"the request has {request.num_bytes} bytes, the limit is {limit}"
            self._requests.pop(request.message.request_id).fail(InvalidRequest(text))

    def _learn_limit(self, info: m.Info) -> None:
        self._max_frame_bytes = info.info.get("limits", {}).get("max_frame_bytes", self._max_frame_bytes)
        for request in list(self._requests.values()):
            if request.num_bytes > SURE_BYTES:
                self._send_submit(request)

    def _abort(self, request_id: str, reader: Listener | None = None) -> None:
        for wire_id in self._choices.get(request_id, [request_id]):
            if (request := self._requests.get(wire_id)) is not None:
                if reader is not None and not is_read_by(request.listener, reader):
                    continue
                request.aborting = True
                if request.accepted:
                    self._connection.queue("follow", ("abort", wire_id), m.Abort(wire_id))
            elif (parent := self._requests.get(request_of(wire_id))) is not None:
                parent.aborted_choices.add(wire_id)

    def _ask(self, message: Question, future: Future[Any]) -> None:
        try:
            checked_size(message)
            self._check_service()
        except TriptychError as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        self._questions.ask(message, future)
        self._next_repeat = min(self._next_repeat, time.monotonic() + REPEAT_S)

    def _repeat(self) -> None:
        for request_id, request in list(self._requests.items()):
            if not request.accepted:
                if request.num_bytes > SURE_BYTES:
                    self._max_frame_bytes = None  # the service may be another one, that cut us off for its size
                self._send_submit(request)
            elif request.aborting:
                self._connection.queue("follow", ("abort", request_id), m.Abort(request_id))
        self._follow(r for r in self._requests.values() if r.accepted)
        self._questions.repeat()

    def _follow_is_due(self, request: OpenRequest) -> bool:
        unacknowledged = request.assembly.num_tokens - request.followed_tokens
        return request.accepted and (request.again or unacknowledged >= ACKNOWLEDGE_TOKENS)

    def _follow(self, requests: Any) -> None:
        entries = []
        for request in requests:
            entries.append([request.assembly.request_id, request.assembly.num_tokens, request.again])
            request.followed_tokens, request.again = request.assembly.num_tokens, False
        for start in range(0, len(entries), m.MAX_FOLLOW_ENTRIES):
            part = entries[start : start + m.MAX_FOLLOW_ENTRIES]
            self._connection.queue("follow", ("follow", part[0][0], part[0][2]), m.Follow(part))

    def _hear(self, message: Any) -> None:
        match message:
            case m.Text():
                for row in message.deltas:
                    self._add(*row)
            case m.Finished() | m.Failed():
                self._end(message)
            case m.Accepted():
                self._accept(message)
            case m.Rejected():
                self._reject(message)
            case m.Info() | m.Stats() | m.Status() | m.Requests():
                self._questions.answer(message)
                if isinstance(message, m.Info):
                    self._learn_limit(message)

    def _accept(self, message: m.Accepted) -> None:
        request = self._requests.get(message.request_id)
        if request is None:
            if message.request_id not in self._refused:
                return  # told twice, of one that has choices, or was let go or answered since
            # It was refused, its caller told, and a repetition of it that was still under way accepted after all.
            self._connection.queue("follow", ("abort", message.request_id), m.Abort(message.request_id))
            self._acknowledge(message.request_id)
        elif not request.accepted:
            request.accepted = True
            request.tell(request.listener.on_accepted, message)
            self._changed[message.request_id] = request
            if request.choices and request.listener is not NOBODY:
                del self._requests[message.request_id]
                self._follow_choices(request)
            if request.aborting:
                self._abort(message.request_id)
            if request.listener is NOBODY:
                self._drop(message.request_id)

    def _follow_choices(self, request: OpenRequest) -> None:
        request_id, listeners = request.assembly.request_id, request.choices
        wire_ids = self._choices[request_id] = choice_ids(request_id, len(listeners))
        for index, (wire_id, listener) in enumerate(zip(wire_ids, listeners, strict=True)):
            assembly = Assembly(wire_id, index=index)
            self._begin(OpenRequest(None, assembly, listener, accepted=True, keep=request.keep))
            if wire_id in request.aborted_choices:
                self._abort(wire_id)

    def _reject(self, message: m.Rejected) -> None:
        request = self._requests.get(message.request_id)
        if request is not None and not request.accepted:
            del self._requests[message.request_id]
            self._refused.add(message.request_id)
            request.fail(from_wire(message.code, message.message, message.param))

    def _add(self, request_id: str, *row: Any) -> bool:
        """False if the row cannot be used: there is a gap before it, which is asked for again."""
        request = self._requests.get(request_id)
        if request is None or not request.accepted:
            return True
        self._changed[request_id] = request
        try:
            delta = request.assembly.add(*row)
        except LookupError:
            request.again = True
            return False
        except InvalidRequest as error:
            self._drop(request_id)
            request.fail(error)
            return False
        if delta is not None:
            request.tell(request.listener.on_delta, delta)
        return True

    def _end(self, end: m.Finished | m.Failed) -> None:
        request = self._requests.get(end.request_id)
        if request is not None:
            if not request.accepted:
                return  # of an earlier one of this id, perhaps another; the FOLLOW after ACCEPTED asks for it again
            if not self._add(end.request_id, end.offset, end.text_offset, end.token_ids, end.text, end.logprobs):
                return
            self._drop(end.request_id)
            error = from_wire(end.code, end.message) if isinstance(end, m.Failed) else None
            request.end(end, error)
            if request.keep:
                return
            self._delivered.add(end.request_id)
        elif end.request_id not in self._delivered:
            return  # it was kept, or let go: for somebody who comes for it
        # Also when it comes again: the first acknowledgement may have died with summarize.
        self._acknowledge(end.request_id)

    def _drop(self, wire_id: str) -> None:
        del self._requests[wire_id]
        request_id = request_of(wire_id)
        if not any(other in self._requests for other in self._choices.get(request_id, ())):
            self._choices.pop(request_id, None)

    def _acknowledge(self, request_id: str) -> None:
        self._connection.queue("follow", ("acknowledge", request_id), m.Acknowledge([request_id]))

    def _fail_all(self, error: TriptychError) -> None:
        """End every request and question with a copy of the error: each has a partial answer of its own."""
        for request in self._requests.values():
            request.fail(copy(error))
        self._requests.clear()
        self._choices.clear()
        self._questions.fail(error)
