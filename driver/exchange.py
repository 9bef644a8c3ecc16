"""What a client says and hears of its requests, over and over until each has its end.

A request is resent until it is answered, followed until it ends, and resumed where it stood when a worker came back:
all of it by sending the same three messages again. Nothing here needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from typing import Any

from ..protocol import messages as m
from ..protocol.channels import Connection
from ..protocol.codec import Frame
from ..protocol.errors import DuplicateId, InvalidRequest, TriptychError, UnknownRequest, from_wire
from ..protocol.groups import request_of
from .choices import choice_ids, is_read_by
from .open_request import LastIds, OpenRequest, check_name, checked_size
from .questions import Question, Questions
from .stream import NOBODY, Assembly, Listener

REPEAT_S = 0.25  # what was not answered is sent again so often; FOLLOW also keeps the lease
ACKNOWLEDGE_TOKENS = 64  # a FOLLOW at least every so many tokens, well within the server's window
MAX_SAID_ANEW = 3  # SUBMITs of what was accepted and is unknown: ACCEPTED to an earlier one may still be under way
SURE_BYTES = 1 << 10  # a frame that every service takes, whatever its max_frame_bytes


class Exchange:
    """All requests and questions of one client over one ``Connection``. For one thread, that of its ``Session``."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.requests: dict[str, OpenRequest] = {}
        self.choices: dict[str, list[str]] = {}  # request id -> what its choices are followed by
        # Of these the service may say something again.
        self._delivered, self._refused = LastIds(), LastIds()
        self._changed: dict[str, OpenRequest] = {}  # whose FOLLOW may be due; nobody looks through all that is open
        self._questions = Questions(connection)
        self._failure: TriptychError | None = None  # of the service, for good
        self._max_frame_bytes: int | None = None  # of the service, once it said so
        self._next_repeat = 0.0

    @property
    def awaits_ends(self) -> bool:
        """Any thread: whether a request is open that was accepted."""
        return any(request.accepted for request in list(self.requests.values()))

    def awaits_aborts(self, names: Iterable[str]) -> bool:
        """Whether any of these requests is to be aborted once it is accepted: before that it cannot be."""
        requests = (request for name in names if (request := self.requests.get(name)) is not None)
        return any(not r.accepted and (r.aborting or r.aborted_choices) for r in requests)

    def say_again(self) -> float:
        """Repeat what was not answered, if it is time; seconds until it will be."""
        now = time.monotonic()
        if now >= self._next_repeat:
            self._repeat()
            self._next_repeat = now + REPEAT_S
        return self._next_repeat - now if self.requests or self._questions else 3600.0

    def hear(self, frames: Iterable[Frame]) -> None:
        """What the service has said."""
        for frame in frames:
            self._hear(frame.message)
        changed, self._changed = self._changed, {}
        self._follow(r for i, r in changed.items() if self.requests.get(i) is r and self._follow_is_due(r))

    def begin(self, request: OpenRequest) -> None:
        request_id = request.assembly.request_id
        try:
            check_name(request_id)
            earlier = self.requests.get(request_id)
            if earlier is not None and earlier.listener is NOBODY:  # somebody comes for it before it is accepted
                request.message, request.accepted = request.message or earlier.message, False
                earlier = None
            if earlier is not None or request_id in self.choices:
                raise DuplicateId(f"this client has a live request {request_id!r} already", param="request_id")
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

    def _check_service(self) -> None:
        if self._failure is not None:
            raise copy(self._failure)

    def _send_submit(self, request: OpenRequest) -> None:
        """Queue the SUBMIT; for a large frame ask for the limit first: the service cuts off who sends one over it."""
        limit = self._max_frame_bytes
        if request.message is None or request.accepted:
            return
        if request.num_bytes <= (limit or SURE_BYTES):
            self._connection.queue("submit", ("submit", request.message.request_id), request.message)
        elif limit is None:
            self._connection.queue("submit", "Info", m.GetInfo())
        else:
            text = f"the request has {request.num_bytes} bytes, the limit is {limit}"
            self.requests.pop(request.message.request_id).fail(InvalidRequest(text))

    def _learn_limit(self, info: m.Info) -> None:
        self._max_frame_bytes = info.info.get("limits", {}).get("max_frame_bytes", self._max_frame_bytes)
        for request in list(self.requests.values()):
            if request.num_bytes > SURE_BYTES:
                self._send_submit(request)

    def let_go(self, request_id: str, error: TriptychError | None, reader: Listener | None) -> None:
        for wire_id in self.choices.get(request_id, [request_id]):
            request = self.requests.get(wire_id)
            if request is not None and (reader is None or is_read_by(request.listener, reader)):
                if request.accepted:
                    self._drop(wire_id)
                else:
                    self.requests[wire_id] = replace(request, listener=NOBODY)
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
                    self._max_frame_bytes = None  # the service may be another one, that cut us off for its size
                self._send_submit(request)
            elif request.aborting:
                self._connection.queue("follow", ("abort", request_id), m.Abort(request_id))
        self._follow(r for r in self.requests.values() if r.accepted)
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
        request = self.requests.get(message.request_id)
        if request is None:
            if message.request_id not in self._refused:
                return  # told twice, of one that has choices, or was let go or answered since
            # It was refused, its caller told, and a repetition of it that was still under way accepted after all.
            self._connection.queue("follow", ("abort", message.request_id), m.Abort(message.request_id))
            self.acknowledge(message.request_id)
        elif not request.accepted:
            request.accepted = True
            if not request.num_said_anew:
                request.tell(request.listener.on_accepted, message)
            self._changed[message.request_id] = request
            if request.choices and request.listener is not NOBODY:
                del self.requests[message.request_id]
                self.follow_choices(request)
            if request.aborting:
                self.abort(message.request_id)
            if request.listener is NOBODY:
                self._drop(message.request_id)

    def follow_choices(self, request: OpenRequest) -> None:
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
        """False if the row cannot be used: there is a gap before it, which is asked for again."""
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
            request.tell(request.listener.on_delta, delta)
        return True

    def _end(self, end: m.Finished | m.Failed) -> None:
        request = self.requests.get(end.request_id)
        if request is not None:
            if not request.accepted:
                return  # of an earlier one of this id, perhaps another; the FOLLOW after ACCEPTED asks for it again
            if isinstance(end, m.Failed) and end.code == UnknownRequest.code and self._begin_anew(request):
                return
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
        self.acknowledge(end.request_id)

    def _begin_anew(self, request: OpenRequest) -> bool:
        """Say a SUBMIT once more that was accepted, if nobody knows the request now; whether that is done.

        It overtook the acknowledgement of an earlier answer, and is refused this time; or nobody read it within its
        lease, and it begins anew. Where its caller has a part of the answer it cannot: the rest might be another one's.
        """
        whole, now = request.whole or request, time.monotonic()
        request_id = whole.assembly.request_id
        parts = [self.requests.get(wire_id) for wire_id in self.choices.get(request_id, [request_id])]
        if whole.num_said_anew == MAX_SAID_ANEW or not whole.may_begin_anew(now):
            return False
        if not all(part is not None and part.is_untouched for part in parts):
            return False
        for wire_id in self.choices.pop(request_id, [request_id]):
            del self.requests[wire_id]
        whole.accepted, whole.again, whole.num_said_anew = False, True, whole.num_said_anew + 1
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
        """End everything with this error, now and whatever comes: the service is gone for good."""
        self._failure = error
        self.end_all(error)

    def end_all(self, error: TriptychError) -> None:
        """End every request and question with a copy of the error: each has a partial answer of its own."""
        for request in self.requests.values():
            request.fail(copy(error))
        self.requests.clear()
        self.choices.clear()
        self._questions.fail(error)
