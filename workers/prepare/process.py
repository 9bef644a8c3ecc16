"""The prepare worker: receives requests, tokenizes them, and passes them to execute as credits allow."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

import numpy as np

from ...protocol import messages as m
from ...protocol.board import FAILED, RUN
from ...protocol.codec import content_key, decode_public, peek_request_id
from ...protocol.config import HASH_MODEL, PipelineConfig
from ...protocol.errors import (
    BadFrame,
    Draining,
    Overloaded,
    PipelineFailed,
    RequestError,
    encodable,
)
from ...protocol.journal.layout import ACCEPTED, ACKNOWLEDGED, DISPATCHED, RELEASED
from ...protocol.journal.releases import is_forgotten, is_released, was_read
from ...protocol.journal.requests import AcceptTimes, RequestWriter
from ...protocol.model_card import LatestCard, ModelCard
from ...protocol.owners import HOUSE, Owners
from ...protocol.record import RequestRecord, mark_of
from ...protocol.record_key import Key, keys_in
from ...protocol.request_ids import check_request_id, request_of
from ...protocol.run_dir import submit_endpoint
from ...protocol.service import service_info
from ..process import StatsPublisher, Ticks, WorkerContext, received_frames, wait_for_model
from .admission import Admission
from .confirmations import Confirmations
from .intake import Intake, check_member_ids, digest_of, num_waiting_bytes
from .known_ids import Known, KnownIds, answered_already
from .queue import CreditQueue, Waiting
from .quotas import Quotas
from .records import make_records
from .request import GenerationRequest, digest_of_adapter
from .text_encoder import TextEncoder
from .tokenizing import Tokenizing

logger = logging.getLogger(__name__)

MAX_FRAMES_A_TURN = 256  # so that a flood does not hold up credits and replies
READING_S = 1.0  # after the last end: until then its client may be about to acknowledge it


def preload(_: PipelineConfig) -> None:
    """Import what the first chat needs, in a process that has nothing else to do yet, or forks workers."""
    from . import template_language  # noqa: F401


def run(context: WorkerContext) -> None:
    context.set_phase("loading")
    if context.config.model.model != HASH_MODEL and ModelCard.read(context.run_dir) is None:
        preload(context.config)  # execute is still importing torch
    if (found := wait_for_model(context, TextEncoder.load)) is not None:
        card, encoder = found
        if context.config.service.chat_template is not None:
            encoder.check_template()
        prepare = Prepare(context, card, encoder)
        context.set_phase("ready")
        prepare.run()


class Prepare:
    """State of the worker. All of it can be rebuilt from the journal, which ``__init__`` does.

    Invariant: at most ``max_live`` sequences are dispatched and not released, except for those dispatched, or belonging
    to a larger request accepted, under a configuration with more. execute admits as many of these as it has room for.
    """

    def __init__(self, context: WorkerContext, card: ModelCard, encoder: TextEncoder) -> None:
        service = context.config.service
        self._context, self._service, self._card, self._encoder = context, service, card, encoder
        self._latest_card = LatestCard(context.run_dir, card)
        self._journal = context.journal
        self._writer = RequestWriter(context.journal)
        past = [(request_of(member), mark) for member, mark in self._writer.past_ids()]
        self._ids = KnownIds(past, max_past=service.max_records)
        self._slots: dict[int, tuple[int, str]] = {}  # generation and request id of every record in use
        self._num_records: Counter[str] = Counter()  # of these, by request id
        self._live: dict[int, int] = {}  # dispatched and not released: slot -> generation
        self._waiting = CreditQueue(context.config.scheduler.arrivals_per_level)  # accepted, without a credit
        self._ended_at = time.monotonic()  # when a request last did
        context.intent.begin()
        self._num_accepted = 0  # requests, since the start, as are the next two
        self._num_prompt_tokens = 0
        self._num_rejected: Counter[str] = Counter()  # by error code
        self._quotas = Quotas(
            max_requests=service.client_requests,
            max_bytes=service.max_client_bytes,
            max_unread=service.max_client_records,
        )
        self._stats = StatsPublisher(context.page, self._collect)
        self._owners = Owners(context.run_dir, service)
        self._adopt_journal()
        self._links = context.links("execute")
        self._ticks = Ticks(self._links.inbox)
        self._bell = self._links.bell()
        self._tokenizing = Tokenizing(context, card, encoder, self._quotas, ring=self._bell.ring, done=self._finish)
        self._router = self._links.router(
            submit_endpoint(context.run_dir, service),
            epoch=context.epoch,
            max_frame_bytes=service.max_frame_bytes,
            public=context.curve_server(service.submit),
        )
        self._confirmations = Confirmations(context, self._router)
        self._poller = self._links.poller(self._router.socket, self._bell.file, *context.stop_files)

    def run(self) -> None:
        try:
            while not self._context.stopping:
                self.wait()
                self.turn()
        finally:
            self._tokenizing.close()
            self._links.close()

    def wait(self) -> None:
        self._poller.wait(min(self._stats.publish_if_due(), self._ticks.wait_s))

    def turn(self) -> None:
        self._bell.silence()
        self._receive()
        self._tokenizing.turn()
        for received in received_frames(self._router, max_frames=MAX_FRAMES_A_TURN):
            self._stats.changed = True
            self._on_frame_alone(*received)
            self._context.page.progress()
        self._confirmations.flush()
        self._dispatch()

    # -- from the other workers

    def _adopt_journal(self) -> None:
        released, found = self._journal.release_states(), self._writer.take_found()
        begun = {view.group for view in found if view.state == DISPATCHED and not released[view.slot]}
        for view in found:
            record = view.record
            accepted = self._enter(view.slot, view.generation, record)
            self._ids.accept(accepted, record.mark, view.key)
            if record.owner != HOUSE:
                self._quotas.accepted(record.owner, view.slot, view.generation)
            if released[view.slot]:
                self._quotas.released(view.slot, view.generation)
            if released[view.slot] or not record.is_computed:
                continue
            if view.state == ACCEPTED and not (record.params.is_beam_search and view.group in begun):
                self._wait_for_credit(view.slot, view.generation, record)
                continue
            if view.state == ACCEPTED:
                # It got its credit together with the other beams, which would wait for it in execute forever.
                self._writer.dispatch(view.slot, view.generation, self._journal.now_ns())
            self._live[view.slot] = view.generation  # execute finds it in the journal, so no message is needed

    def _receive(self) -> None:
        for message in self._links.inbox.recv_all():
            match message:
                case m.Release():
                    for slot, generation in keys_in(message):
                        self._released(slot, generation)
                case m.Forgotten():
                    for slot, generation in keys_in(message):
                        self._forget(slot, generation)
        if self._ticks.begin_if_due():
            self._scan()
            self._router.limit_unfinished()

    def _scan(self) -> None:
        """Catch up on releases whose messages were lost, from the journal."""
        slots = np.fromiter(self._slots, np.int64)
        for slot, state in zip(slots.tolist(), self._journal.release_states(slots).tolist(), strict=True):
            if state in (RELEASED, ACKNOWLEDGED):
                self._released(slot, self._slots[slot][0])
            elif state:
                self._forget(slot, self._slots[slot][0])

    def _released(self, slot: int, generation: int) -> None:
        """The request ended: it returns its credit, or its place in the queue."""
        self._quotas.released(slot, generation)
        if self._live.get(slot) == generation:
            del self._live[slot]
        elif not self._waiting.remove(slot, generation):
            return
        self._ended_at, self._stats.changed = time.monotonic(), True

    def _forget(self, slot: int, generation: int) -> None:
        self._released(slot, generation)
        self._quotas.forgotten(slot, generation)
        if self._slots.get(slot, (None, ""))[0] == generation and self._writer.recycle(slot, generation):
            request_id = self._slots.pop(slot)[1]
            self._num_records[request_id] -= 1
            if not self._num_records[request_id]:
                del self._num_records[request_id]
                self._ids.forget(request_id, was_read=was_read(self._journal, slot, generation))
            self._stats.changed = True

    def _dispatch(self) -> None:
        while waiting := self._waiting.pop(self._card.max_live - len(self._live), is_idle=not self._live):
            for slot, generation, record in waiting:
                if is_released(self._journal, slot, generation):
                    continue  # ended while it was waiting
                self._writer.dispatch(slot, generation, self._journal.now_ns())
                self._live[slot] = generation
                self._links.send("execute", m.Prepared(slot, generation, record))
            self._stats.changed = True

    def _wait_for_credit(self, slot: int, generation: int, record: RequestRecord) -> None:
        waiting = Waiting(slot, generation, record.to_bytes())
        arrival = int(self._journal.records["arrival"][slot])
        self._waiting.push(request_of(record.request_id), waiting, arrival=arrival, priority=record.priority)

    # -- from the clients

    def _on_frame_alone(self, peer: bytes, frame: bytes) -> None:
        """Record the intent before anything looks at the frame: decoding alone may crash this process."""
        key = content_key(frame)
        try:
            if self._tokenizing.has_to_wait(key):
                return  # its client resends it
        except RequestError as error:
            self._refuse(peer, peek_request_id(frame), error)
            return
        self._context.intent.set_standing([key])
        self._on_frame_safely(peer, frame)
        self._context.intent.set_standing([])
        self._tokenizing.suspects.clear(key)

    def _on_frame_safely(self, peer: bytes, frame: bytes) -> None:
        try:
            self._on_frame(peer, frame)
        except Exception as error:  # a bug triggered by one message must not affect others
            logger.exception("a message could not be handled")
            failure = RequestError(f"the message could not be handled: {type(error).__name__}")
            self._refuse_known(peer, peek_request_id(frame), failure)

    def _on_frame(self, peer: bytes, frame: bytes) -> None:
        received_ns = self._journal.now_ns()
        try:
            message = decode_public(frame, max_bytes=self._service.max_frame_bytes).message
        except BadFrame as error:
            self._refuse(peer, peek_request_id(frame), error)
            return
        match message:
            case m.Submit():
                self._submit(peer, message, len(frame), received_ns)
            case m.GetInfo():
                self._router.send(peer, m.Info(service_info(self._context.run_dir, self._service)))
            case _:
                self._refuse(peer, "", BadFrame(f"{type(message).__name__} does not belong on the submit socket"))

    def _submit(self, peer: bytes, message: m.Submit, num_bytes: int, received_ns: int) -> None:
        request_id = message.request_id
        try:
            check_request_id(request_id)
            digest, number = digest_of(message.request), self._owners.number(self._router.owner(peer))
            mark = mark_of(digest, number)
            if (known := self._ids.seen(request_id, mark)) is not None:
                self._answer_again(peer, request_id, known)
                return
            if self._tokenizing.has_to_wait(digest):
                return  # its client resends it
            # HOUSE is not a single client: its owners are the individual connections or keys.
            owner, num_waiting = number or self._router.owner(peer), num_waiting_bytes(message.request, num_bytes)
            self._check_room(num_waiting)
            self._quotas.check(owner, num_waiting)
            request = GenerationRequest.from_wire(message.request)
            self._digest_of_adapter(request.lora)
            check_member_ids(request_id, request.sampling.group_size)
        except RequestError as error:
            self._refuse(peer, request_id, error)
            return
        self._ids.begin(request_id, mark)
        self._tokenizing.begin(Intake(peer, owner, request_id, digest, mark, num_bytes, request, received_ns))

    def _answer_again(self, peer: bytes, request_id: str, known: Known) -> None:
        """Reply to a request that is sent again.

        Raises:
            RequestError: it has been answered, or was dropped unread by a pipeline that takes no new requests.
        """
        if known.accepted is None:
            return  # still being tokenized: a reply will follow
        if was_read(self._journal, *known.key):
            raise answered_already(request_id)
        if is_forgotten(self._journal, *known.key):
            self._check_room(0)
            return  # its client was away for too long. Once the record is free, a resend starts the request anew.
        self._writer.note_told(known.key[0], self._journal.now_ns())
        self._confirmations.send(peer, known.accepted)

    def _check_room(self, num_bytes: int) -> None:
        """``num_bytes``: how many would wait for the compiler or the tokenizer."""
        if self._context.board.mode == FAILED:
            raise PipelineFailed()
        if self._context.board.mode != RUN:
            raise Draining("the pipeline is stopping and takes no new requests")
        if len(self._waiting) >= self._service.max_queue:
            raise Overloaded(f"{len(self._waiting)} requests are waiting, the limit is {self._service.max_queue}")
        if num_bytes and self._tokenizing.pending_bytes + num_bytes > self._service.max_pending_bytes:
            raise Overloaded(
                f"{self._tokenizing.pending_bytes} bytes of prompts are waiting for the tokenizer,"
                f" {num_bytes} more exceed the limit of {self._service.max_pending_bytes}"
            )

    def _finish(self, intake: Intake, result: Admission | RequestError) -> None:
        self._stats.changed = True
        try:
            if isinstance(result, RequestError):
                raise result
            # While this one was being tokenized, others may have been accepted, or a stop may have begun.
            self._check_room(0)
            self._quotas.check(intake.owner, 0)
            self._accept(intake, result)
        except RequestError as error:
            self._refuse_known(intake.peer, intake.request_id, error)
        except Exception as error:  # as in _on_frame_safely
            logger.exception("request %s could not be accepted", intake.request_id)
            failure = RequestError(f"the request could not be accepted: {type(error).__name__}")
            self._refuse_known(intake.peer, intake.request_id, failure)

    def _accept(self, intake: Intake, admission: Admission) -> None:
        lora_digest = self._digest_of_adapter(intake.request.lora)
        records = make_records(intake, admission, lease_s=self._service.lease_s, lora_digest=lora_digest)
        times = AcceptTimes(
            intake.received_ns, intake.tokenize_start_ns, intake.tokenize_end_ns, self._journal.now_ns()
        )
        for (slot, generation), record in zip(self._publish(records, times), records, strict=True):
            key = slot, generation
            accepted = self._enter(*key, record)
            self._quotas.accepted(intake.owner, slot, generation)
            if record.is_computed:  # otherwise summarize answers it alone
                self._wait_for_credit(slot, generation, record)
        self._ids.accept(accepted, intake.mark, key)
        self._num_accepted += 1
        if records[0].is_computed:
            self._num_prompt_tokens += accepted.num_prompt_tokens
        self._confirmations.send(intake.peer, accepted)

    def _publish(self, records: list[RequestRecord], times: AcceptTimes) -> list[Key]:
        """
        Raises:
            Overloaded: the journal is full; with the param ``lease_s`` if it is so of answers that nobody acknowledges.
        """
        try:
            return self._writer.accept_all(records, times)
        except Overloaded as error:
            if self._live or self._waiting or time.monotonic() - self._ended_at < READING_S:
                raise
            text = f"{error.message}: it is full of ended answers, each kept until it is acknowledged or its lease ends"
            raise Overloaded(text, param="lease_s") from error

    def _digest_of_adapter(self, name: str) -> str:
        """
        Raises:
            InvalidRequest: no such adapter is offered.
        """
        return digest_of_adapter(name, self._latest_card.offered() if name else {})

    def _enter(self, slot: int, generation: int, record: RequestRecord) -> m.Accepted:
        """Register a record in use; returns the reply for its client."""
        request_id = request_of(record.request_id)
        self._slots[slot] = (generation, request_id)
        self._num_records[request_id] += 1
        return m.Accepted(request_id, record.num_prompt_tokens, record.num_truncated_tokens, record.token_capacity)

    def _refuse_known(self, peer: bytes, request_id: str, error: RequestError) -> None:
        """For a request that was begun; its client may send it again."""
        self._ids.refuse(request_id)
        self._refuse(peer, request_id, error)

    def _refuse(self, peer: bytes, request_id: str, error: RequestError) -> None:
        self._num_rejected[error.code] += 1
        text = encodable(error.message)
        self._router.send(peer, m.Rejected(request_id[: m.MAX_REFUSED_ID_CHARS], error.code, text, error.param))

    def _collect(self) -> dict[str, Any]:
        return {
            "waiting": len(self._waiting),
            "live": len(self._live),
            "max_live": self._card.max_live,
            "pending_bytes": self._tokenizing.pending_bytes,
            "records_used": len(self._slots),
            "records_free": self._writer.num_free,
            "bad_frames": self._router.num_bad_frames + self._links.inbox.num_bad_frames,
            "accepted": self._num_accepted,
            "prompt_tokens": self._num_prompt_tokens,
            "rejected": dict(self._num_rejected),
        }
