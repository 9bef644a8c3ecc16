"""A client's messages about its requests, repeated until each request has ended.

A request is resent until it is answered, followed until it ends, and resumed after a worker restarts: all by sending
the same three messages again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from typing import Any

from ..protocol import messages as m
from ..protocol.codec import Frame
from ..protocol.connection import Connection
from ..protocol.errors import DuplicateId, InvalidRequest, TriptychError, UnknownRequest, from_wire
from ..protocol.request_ids import request_of
from .choices import choice_ids, is_read_by
from .copies import Copies
from .open_request import LastIds, OpenRequest, check_name, checked_size
from .questions import Question, Questions
from .stream import NO_LISTENER, Assembly, Listener

REPEAT_S = 0.25  # how often unanswered messages are resent; FOLLOW also renews the lease
ACKNOWLEDGE_TOKENS = 64  # a FOLLOW at least every so many tokens, well within the server's window
MAX_RESUBMISSIONS = 3  # SUBMITs of an accepted, then unknown request: ACCEPTED to an earlier one may still be in flight
MAX_ASK_S = 2.0  # between two questions for the limit of frames, while there is no answer
SURE_BYTES = 1 << 10  # a frame size that every service accepts, whatever its max_frame_bytes


class Exchange:
    """All requests and questions of one client over one ``Connection``. Not thread-safe: used by its ``Session``."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.requests: dict[str, OpenRequest] = {}
        self.choices: dict[str, list[str]] = {}  # request id -> ids of its choices, which are followed instead of it
        # The service may repeat messages about these.
        self._delivered, self._refused = LastIds(), LastIds()
        self._changed: dict[str, OpenRequest] = {}  # those that may need a FOLLOW; saves a scan of all open requests
        self._questions = Questions(connection)
        self._failure: TriptychError | None = None  # set once the service is gone for good
        self._max_frame_bytes: int | None = None  # of the service, once known
        self._epoch = 0  # of its life that told us that
        self._ask_at, self._ask_wait_s = 0.0, REPEAT_S  # when to ask for it once more, and how long after the last time
        self._next_repeat = 0.0

    @property
    def awaits_ends(self) -> bool:
        """Whether an accepted request is still open. Thread-safe."""
        return any(request.accepted for request in list(self.requests.values()))

    def awaits_aborts(self, names: Iterable[str]) -> bool:
        """Whether any of these requests is to be aborted once it is accepted; it cannot be before."""
        requests = (request for name in names if (request := self.requests.get(name)) is not None)
        return any(not r.accepted and (r.aborting or r.aborted_choices) for r in requests)

    def resend_due(self) -> float:
        """Resend what is unanswered, if it is time; returns the seconds until the next time."""
        now = time.monotonic()
        if now >= self._next_repeat:
            self._repeat()
            self._next_repeat = now + REPEAT_S
        return self._next_repeat - now if self.requests or self._questions else 3600.0

    def receive(self, frames: Iterable[Frame]) -> None:
        """Process messages from the service."""
        for frame in frames:
            if isinstance(frame.message, m.Info):
                self._learn_limit(frame.message, frame.epoch)
            self._on_message(frame.message)
        changed, self._changed = self._changed, {}
        self._follow(r for i, r in changed.items() if self.requests.get(i) is r and self._follow_is_due(r))

    def begin(self, request: OpenRequest) -> None:
        request_id = request.assembly.request_id
        try:
            check_name(request_id)
            earlier = self.requests.get(request_id)
            if earlier is not None and earlier.listener is NO_LISTENER:  # detached before its acceptance, now resumed
                request.take_over(earlier)
                earlier = None
            if earlier is not None or request_id in self.choices:
                raise DuplicateId(f"this client already has a live request {request_id!r}", param="request_id")
            request.check()
            self._check_service()
        except TriptychError as error:
            request.fail(error)
            return
        request.begun_s = time.monotonic()
        self.requests[request_id] = request
        self._delivered.discard(request_id)
        self._refused.discard(request_id)
        self._changed[request_id] = request
        self._send_submit(request)
        self._next_repeat = min(self._next_repeat, time.monotonic() + REPEAT_S)

    def resume_all(self, request: OpenRequest) -> None:
        """Follow the choices of a request, now or once it is accepted."""
        request_id = request.assembly.request_id
        if request_id in self.requests or request_id in self.choices:
            self.begin(request)  # takes over a request that has no listener, and refuses a second one for any other
        else:
            self._follow_choices(request)

    def _check_service(self) -> None:
        if self._failure is not None:
            raise copy(self._failure)

    def _send_submit(self, request: OpenRequest) -> None:
        """Queue the SUBMIT; for a large frame ask for the limit first, as the service disconnects clients above it.

        The answer also says that what was sent before has arrived, so it is not sent again while it is on its way.
        """
        limit, now = self._max_frame_bytes, time.monotonic()
        if request.message is None or request.accepted:
            return
        if request.num_bytes > SURE_BYTES and limit is None:
            self._ask_limit(now)
        elif request.num_bytes > (limit or SURE_BYTES):
            text = f"the request has {request.num_bytes} bytes, the limit is {limit}"
            self.requests.pop(request.message.request_id).fail(InvalidRequest(text))
        elif request.num_bytes <= SURE_BYTES or request.copies.is_due(self._epoch, now):
            self._connection.queue("submit", ("submit", request.message.request_id), request.message)

    def _ask_limit(self, now: float) -> None:
        """Less and less often: the answers to all these questions come at once when a slow line is free again."""
        if now >= self._ask_at:
            self._connection.queue("submit", "Info", m.GetInfo())
            self._ask_at, self._ask_wait_s = now + self._ask_wait_s, min(2 * self._ask_wait_s, MAX_ASK_S)

    def _learn_limit(self, info: m.Info, epoch: int) -> None:
        self._max_frame_bytes = info.info.get("limits", {}).get("max_frame_bytes", self._max_frame_bytes)
        self._epoch, self._ask_at, self._ask_wait_s = epoch, 0.0, REPEAT_S
        for request in list(self.requests.values()):
            if request.num_bytes > SURE_BYTES:
                self._send_submit(request)

    def detach(self, request_id: str, error: TriptychError | None, reader: Listener | None) -> None:
        for wire_id in self.choices.get(request_id, [request_id]):
            request = self.requests.get(wire_id)
            if request is not None and (reader is None or is_read_by(request.listener, reader)):
                if request.accepted:
                    self._drop(wire_id)
                else:
                    self.requests[wire_id] = replace(request, listener=NO_LISTENER)
                if error is not None:
                    request.fail(copy(error))

    def abort(self, request_id: str, reader: Listener | None = None) -> None:
        for wire_id in self.choices.get(request_id, [request_id]):
            if (request := self.requests.get(wire_id)) is not None:
                if reader is not None and not is_read_by(request.listener, reader):
                    continue
                request.aborting = True
                if request.accepted:
                    self._connection.queue("follow", ("abort", wire_id), m.Abort(wire_id))
            elif (parent := self.requests.get(request_of(wire_id))) is not None:
                parent.aborted_choices.add(wire_id)

    def ask(self, message: Question, future: Future[Any]) -> None:
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
        for request_id, request in list(self.requests.items()):
            if not request.accepted:
                if request.num_bytes > SURE_BYTES:
                    self._max_frame_bytes = None  # a restarted service may have another limit, and have disconnected us
                self._send_submit(request)
            elif request.aborting:
                self._connection.queue("follow", ("abort", request_id), m.Abort(request_id))
        self._follow(r for r in self.requests.values() if r.accepted)
        self._questions.repeat()

    def _follow_is_due(self, request: OpenRequest) -> bool:
        unacknowledged = request.assembly.num_tokens - request.followed_tokens
        return request.accepted and (request.again or unacknowledged >= ACKNOWLEDGE_TOKENS)

    def _follow(self, requests: Iterable[OpenRequest]) -> None:
        entries = []
        for request in requests:
            entries.append([request.assembly.request_id, request.assembly.num_tokens, request.again])
            request.followed_tokens, request.again = request.assembly.num_tokens, False
        for start in range(0, len(entries), m.MAX_FOLLOW_ENTRIES):
            part = entries[start : start + m.MAX_FOLLOW_ENTRIES]
            self._connection.queue("follow", ("follow", part[0][0], part[0][2]), m.Follow(part))

    def _on_message(self, message: Any) -> None:
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

    def _accept(self, message: m.Accepted) -> None:
        request = self.requests.get(message.request_id)
        if request is None:
            if message.request_id not in self._refused:
                return  # a repetition for a request that has choices, was let go, or has already been answered
            # It was refused, its caller told, and a resent copy still in flight was accepted after all.
            self._connection.queue("follow", ("abort", message.request_id), m.Abort(message.request_id))
            self.acknowledge(message.request_id)
        elif not request.accepted:
            request.accepted = True
            if not request.num_resubmissions:
                request.notify(request.listener.on_accepted, message)
            self._changed[message.request_id] = request
            if request.choices and request.listener is not NO_LISTENER:
                del self.requests[message.request_id]
                self._follow_choices(request)
            if request.aborting:
                self.abort(message.request_id)
            if request.listener is NO_LISTENER:
                self._drop(message.request_id)

    def _follow_choices(self, request: OpenRequest) -> None:
        request_id, listeners = request.assembly.request_id, request.choices
        wire_ids = self.choices[request_id] = choice_ids(request_id, len(listeners))
        for index, (wire_id, listener) in enumerate(zip(wire_ids, listeners, strict=True)):
            assembly = Assembly(wire_id, index=index)
            self.begin(OpenRequest(None, assembly, listener, accepted=True, keep=request.keep, whole=request))
            if wire_id in request.aborted_choices:
                self.abort(wire_id)

    def _reject(self, message: m.Rejected) -> None:
        request = self.requests.get(message.request_id)
        if request is not None and not request.accepted:
            del self.requests[message.request_id]
            self._refused.add(message.request_id)
            request.fail(from_wire(message.code, message.message, message.param))

    def _add(self, request_id: str, *row: Any) -> bool:
        """False if there is a gap before the row; the missing part is then requested again."""
        request = self.requests.get(request_id)
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
            request.notify(request.listener.on_delta, delta)
        return True

    def _end(self, end: m.Finished | m.Failed) -> None:
        request = self.requests.get(end.request_id)
        if request is not None:
            if not request.accepted:
                return  # of an earlier request with this id; the FOLLOW after ACCEPTED asks for the right one
            if isinstance(end, m.Failed) and end.code == UnknownRequest.code and self._resubmit(request):
                return
            if not self._add(end.request_id, end.offset, end.text_offset, end.token_ids, end.text, end.logprobs):
                return
            self._drop(end.request_id)
            error = from_wire(end.code, _why(end, request)) if isinstance(end, m.Failed) else None
            request.end(end, error)
            if request.keep:
                return
            self._delivered.add(end.request_id)
        elif end.request_id not in self._delivered:
            return  # kept, or let go: others may come for it
        # Even if it is a repetition: the first acknowledgement may have been lost with summarize.
        self.acknowledge(end.request_id)

    def _resubmit(self, request: OpenRequest) -> bool:
        """Submit an accepted request once more if the service does not know it any more; whether that was done.

        Either the SUBMIT overtook the acknowledgement of an earlier answer, and will be refused this time; or nobody
        followed the request within its lease, and it starts over. Not possible once its caller has part of the answer:
        the rest might come from a different one.
        """
        whole, now = request.whole or request, time.monotonic()
        request_id = whole.assembly.request_id
        parts = [self.requests.get(wire_id) for wire_id in self.choices.get(request_id, [request_id])]
        if whole.num_resubmissions == MAX_RESUBMISSIONS or not whole.may_resubmit(now):
            return False
        if not all(part is not None and part.is_untouched for part in parts):
            return False
        for wire_id in self.choices.pop(request_id, [request_id]):
            del self.requests[wire_id]
        whole.accepted, whole.again, whole.num_resubmissions = False, True, whole.num_resubmissions + 1
        whole.copies = Copies()
        self.requests[request_id] = whole
        self._send_submit(whole)
        self._next_repeat = min(self._next_repeat, now + REPEAT_S)
        return True

    def _drop(self, wire_id: str) -> None:
        del self.requests[wire_id]
        request_id = request_of(wire_id)
        if not any(other in self.requests for other in self.choices.get(request_id, ())):
            self.choices.pop(request_id, None)

    def acknowledge(self, request_id: str) -> None:
        self._connection.queue("follow", ("acknowledge", request_id), m.Acknowledge([request_id]))

    def fail(self, error: TriptychError) -> None:
        """End everything with this error, now and in the future: the service is gone for good."""
        self._failure = error
        self.end_all(error)

    def end_all(self, error: TriptychError) -> None:
        """End every request and question with a copy of the error: each carries its own partial answer."""
        for request in self.requests.values():
            request.fail(copy(error))
        self.requests.clear()
        self.choices.clear()
        self._questions.fail(error)


def _why(end: m.Failed, request: OpenRequest) -> str:
    """Its message. Of a request that it has forgotten, the service does not know what became of it."""
    if end.code == UnknownRequest.code and request.message is not None:
        return f"{end.message}: it was accepted, but no client was heard for longer than its lease, or another ended it"
    return end.message
