"""The summarize worker: turns tokens into text, sends it to clients, and ends every request.

Only this worker decides how an answer ended, so there is exactly one end, even if execute finishes it, a client aborts
it and its lease expires at the same moment.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from ...protocol import messages as m
from ...protocol.board import FAILED, STOP
from ...protocol.codec import decode_public, peek_request_id
from ...protocol.config import PipelineConfig
from ...protocol.errors import BadFrame, PipelineFailed
from ...protocol.model_card import ModelCard
from ...protocol.owners import Owners
from ...protocol.run_dir import follow_endpoint
from ...protocol.starvation import OwnTime
from ..process import StatsPublisher, Ticks, WorkerContext, received_frames, wait_for_model
from .answer import Answer
from .answers import Answers
from .choices import Choices, unknown
from .deadlines import Deadlines
from .delivery import RETRY_S, Delivery
from .ends import Ends
from .figures import Figures
from .listing import list_requests
from .notices import Notices
from .status import status_of
from .texts import Texts
from .vocabulary import Vocabulary

logger = logging.getLogger(__name__)

MAX_FRAMES_A_TURN = 1024
LAST_WORDS_S = 2.0  # during a stop, time for clients to fetch and acknowledge their ends


def preload(_: PipelineConfig) -> None:
    """Nothing: all of its imports are those of this module."""


def run(context: WorkerContext) -> None:
    context.set_phase("loading")
    if (found := wait_for_model(context, Vocabulary.load)) is not None:
        summarize = Summarize(context, *found)
        context.set_phase("ready")
        summarize.run()


class Summarize:
    """State of the worker. All of it can be rebuilt from the journal, except for who reads what, and how far: clients
    repeat that with every FOLLOW.
    """

    def __init__(self, context: WorkerContext, card: ModelCard, vocabulary: Vocabulary) -> None:
        service = context.config.service
        self._context, self._service = context, service
        self._owners = Owners(context.run_dir, service)
        self._journal = context.journal
        self._deadlines = Deadlines(context.journal, context.board)
        self._flushes = service.flushes_steps
        self._has_looked = False  # for new requests in the journal, since the current frame arrived
        self._stats = StatsPublisher(context.page, self._collect)
        self._links = context.links("prepare", "execute")
        self._ticks = Ticks(self._links.inbox)
        self._notices = Notices(self._links)
        self._router = self._links.router(
            follow_endpoint(context.run_dir, service),
            epoch=context.epoch,
            max_frame_bytes=service.max_frame_bytes,
            public=context.curve_server(service.follow),
        )
        self._delivery = Delivery(self._router, context.journal, window=service.window_tokens)
        self._ends = Ends(context.journal, context.board, self._delivery, self._notices, self._stats)
        texts = Texts(context, card, vocabulary, self._ends)
        self._answers = Answers(context, texts, self._ends, delivery=self._delivery, deadlines=self._deadlines)
        self._requests = self._answers.requests
        self._poller = self._links.poller(self._router.socket, *context.stop_files)
        self._answers.discover()
        self._answers.figures = Figures()  # what was found at the start has been counted before the restart

    def run(self) -> None:
        try:
            while not self._context.stopping:
                self.wait()
                self.turn()
            if self._context.board.mode == STOP:
                self._end_all()
        finally:
            self._links.close()

    def wait(self) -> None:
        patience = min(self._stats.publish_if_due(), self._ticks.wait_s)
        patience = self._deadlines.wait_s(self._journal.now_ns(), patience)
        retry_s = self._delivery.wait_s
        self._poller.wait(patience if retry_s is None else min(patience, retry_s))

    def turn(self) -> None:
        for message in self._links.inbox.recv_all():
            if isinstance(message, m.StepDone):
                self._stats.changed = True
                self._answers.take(message)
                self._context.page.progress()  # several may have arrived while a slow one was processed
        for received in received_frames(self._router, max_frames=MAX_FRAMES_A_TURN):
            self._on_frame_safely(*received)
        if self._ticks.begin_if_due():
            self._tick(time.monotonic())
            self._router.limit_unfinished()
        self._end_overdue()
        self._notices.send()
        if self._flushes and self._answers.has_found:
            self._context.flush_journal()
        self._answers.has_found = False
        self._delivery.deliver()

    def _end_all(self) -> None:
        """The pipeline is stopping: end all answers, and give readers a moment to fetch and acknowledge the ends."""
        own_time = OwnTime(os.getpid())
        poller = self._links.poller(self._router.socket)  # without the stop files, which stay readable
        while True:
            may_come = self._context.board.phase("prepare") == "ready"  # a request that it accepts right now
            self._answers.discover()
            for answer in list(self._answers.values()):
                self._ends.end(answer, "abort")
            # Only now: choices that are ranked have no readers before their ends.
            is_late = own_time.elapsed_s > LAST_WORDS_S and not self._delivery.has_untold
            is_last = is_late or not (may_come or self._has_readers())
            self.turn()
            if is_last:
                return
            poller.wait(RETRY_S)

    def _has_readers(self) -> bool:
        """Whether a first FOLLOW may be in flight, or an end is unacknowledged."""
        now = time.monotonic()
        return any(
            answer.peer is not None or not (answer.choices.was_followed or now > answer.choices.lease_until)
            for answer in self._answers.values()
        )

    # -- from the clients

    def _on_frame_safely(self, peer: bytes, frame: bytes) -> None:
        self._has_looked = False
        try:
            self._on_frame(peer, frame)
        except Exception as error:  # a bug triggered by one message must not affect others
            logger.exception("a message could not be handled")
            self._refuse(peer, BadFrame(f"the message could not be handled: {type(error).__name__}"))

    def _on_frame(self, peer: bytes, frame: bytes) -> None:
        try:
            message = decode_public(frame, max_bytes=self._service.max_frame_bytes).message
        except BadFrame as error:
            self._refuse(peer, error)
            return
        asker = self._owners.number(self._router.owner(peer))
        match message:
            case m.Follow():
                self._follow(peer, message, asker)
            case m.Abort():
                for answer in self._find(message.request_id, asker):
                    self._ends.end(answer, "abort")
            case m.Acknowledge():
                for request_id in message.request_ids:
                    self._acknowledge(request_id, asker)
            case m.GetStats():
                self._router.send(peer, m.Stats(self._context.board.stats()))
            case m.GetStatus():
                found = self._find(message.request_id, asker)
                self._router.send(peer, status_of(message.request_id, found, self._journal))
            case m.GetRequests():
                self._answers.discover()
                answers, ended = self._answers.values(), self._ends.latest
                self._router.send(peer, list_requests(self._journal, answers, message.limit, ended, asker=asker))
            case _:
                astray = BadFrame(f"{type(message).__name__} does not belong on the follow socket")
                self._refuse(peer, astray, request_id=peek_request_id(frame)[: m.MAX_REFUSED_ID_CHARS])

    def _refuse(self, peer: bytes, error: BadFrame, *, request_id: str = "") -> None:
        self._answers.figures.num_bad_frames += 1
        self._router.send(peer, m.Rejected(request_id, error.code, error.message, error.param))

    def _follow(self, peer: bytes, message: m.Follow, asker: int) -> None:
        now = time.monotonic()
        for request_id, offset, again in message.entries:
            choices = self._request(request_id, asker)
            if choices is not None and not choices.are_complete:
                choices = None  # a process that died while forgetting the request has left only some records
            index = None if choices is None else choices.index_of(request_id)
            if choices is None or index is None:
                self._router.send(peer, unknown(request_id, choices))
                continue
            choices.lease_until = now + choices.lease_s
            if answer := choices.follow(index, peer, offset, again):
                self._delivery.mark(answer)

    def _request(self, wire_id: str, asker: int) -> Choices | None:
        """The request that an id from a client belongs to, if that client may access it."""
        choices = self._requests.get(wire_id, asker=asker)
        # A client knows the id from prepare, so the journal had it before this frame arrived: one look is enough.
        if not self._has_looked and (choices is None or not choices.are_complete):
            self._answers.discover()
            self._has_looked = True
        return self._requests.get(wire_id, asker=asker)

    def _find(self, wire_id: str, asker: int) -> list[Answer]:
        """The answers of a choice or of a whole request."""
        choices = self._request(wire_id, asker)
        return [] if choices is None else choices.of(wire_id)

    # -- ends

    def _acknowledge(self, wire_id: str, asker: int) -> None:
        choices = self._requests.get(wire_id, asker=asker)
        news = [] if choices is None else choices.acknowledge(wire_id)
        if choices is not None and choices.are_acknowledged:
            self._ends.forget(choices)
            self._drop(choices)
        else:
            self._ends.acknowledge(news)

    def _drop(self, choices: Choices) -> None:
        self._answers.drop(choices)
        self._stats.changed = True

    def _tick(self, now: float) -> None:
        """Handle what no message triggers: requests not yet discovered, gaps at the end of a stream, leases."""
        self._answers.discover()
        gave_up = self._context.board.mode == FAILED
        for answer in list(self._answers.values()):
            self._answers.catch_up(answer)
            if gave_up and not answer.stream.is_finished:
                self._ends.fail(answer, PipelineFailed())
        for choices in self._requests.overdue(now):
            self._end_lease(choices, now)

    def _end_lease(self, choices: Choices, now: float) -> None:
        if (left_s := choices.left_to_ask_s(self._journal)) > 0:
            choices.lease_until = now + left_s
            return
        for answer in choices.answers.values():
            self._ends.end(answer, "abort")
        if (left_s := choices.left_to_come_s(self._journal)) > 0:
            choices.lease_until = now + left_s
        else:
            self._ends.give_up(choices)
            self._drop(choices)

    def _end_overdue(self) -> None:
        """Enforce deadlines, whatever the other workers do: a request may have no credit, or execute may be down."""
        now_ns = self._journal.now_ns()
        for key in self._deadlines.due(now_ns):
            if self._answers.is_open(key):
                answer = self._answers[key[0]]
                self._answers.catch_up(answer)  # the end may have come in time, or further tokens
                if (error := self._deadlines.judge(answer, now_ns)) is not None:
                    self._ends.fail(answer, error)
        self._deadlines.tidy(self._answers.is_open, num_live=len(self._answers))

    # -- out

    def _collect(self) -> dict[str, Any]:
        # Keep publishing until the board shows a rate of zero.
        figures = self._answers.figures
        self._stats.changed = self._stats.changed or figures.tokens_per_second > 0
        return figures.to_map(self._answers.values(), self._ends, num_bad_frames=self._router.num_bad_frames)
