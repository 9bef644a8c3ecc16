"""The prepare worker: takes requests in, tokenises them, and hands them to execute as credits allow."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...protocol import messages as m
from ...protocol.board import RUN
from ...protocol.channels import Bell, Links, Poller
from ...protocol.codec import decode_public, peek_request_id
from ...protocol.config import ModelCard
from ...protocol.errors import BadFrame, Draining, Overloaded, RequestError
from ...protocol.journal.layout import ACCEPTED, FORGOTTEN, RELEASED
from ...protocol.journal.releases import is_released
from ...protocol.journal.requests import AcceptTimes, RequestWriter, read_request
from ...protocol.record import RequestRecord
from ...protocol.run_dir import CARD_FILE, submit_endpoint
from ..process import TICK_S, StatsPublisher, WorkerContext
from .admission import Admission, admit
from .grammar_checker import GrammarChecker, GrammarQueue
from .intake import KnownIds, check_request_id, digest_of
from .queue import CreditQueue
from .request import GenerationRequest
from .text_encoder import TextEncoder

logger = logging.getLogger(__name__)

INLINE_BYTES = 16 << 10  # prompts up to this size are tokenised at once, larger ones by a thread beside
WAIT_FOR_MODEL_S = 0.02
MAX_FRAMES_A_TURN = 256  # so that credits and replies are not kept waiting by a flood


@dataclass(slots=True)
class Intake:
    """One request on its way through this process."""

    peer: bytes
    request_id: str
    digest: int
    num_bytes: int
    request: GenerationRequest
    received_ns: int
    grammar: str = ""  # compiled from request.structured
    tokenize_start_ns: int = 0
    tokenize_end_ns: int = 0

    def time_after(self, limit_ms: float | None) -> int:
        """CLOCK_MONOTONIC in ns, so long after the receipt; 0 without a limit."""
        return 0 if limit_ms is None else self.received_ns + int(limit_ms * 1e6)


def run(context: WorkerContext) -> None:
    context.set_phase("loading")
    card, encoder = _wait_for_model(context)
    if card is not None and encoder is not None:
        prepare = Prepare(context, card, encoder)
        context.set_phase("ready")
        prepare.run()


def _wait_for_model(context: WorkerContext) -> tuple[ModelCard | None, TextEncoder | None]:
    """What execute found out about the model; ``None, None`` if told to stop before it was known."""
    while not context.stopping:
        encoder = TextEncoder.load(context.run_dir)
        card = context.run_dir / CARD_FILE
        if encoder is not None and card.exists():
            return ModelCard.from_wire(json.loads(card.read_text())), encoder
        context.page.progress()
        time.sleep(WAIT_FOR_MODEL_S)
    return None, None


class Prepare:
    """State of the worker. All of it is in the journal too, from which ``__init__`` takes it.

    Invariant: at most ``max_live`` requests are dispatched and not released.
    """

    def __init__(self, context: WorkerContext, card: ModelCard, encoder: TextEncoder) -> None:
        service = context.config.service
        self._context, self._service, self._card, self._encoder = context, service, card, encoder
        self._journal = context.journal
        self._writer = RequestWriter(context.journal)
        self._ids = KnownIds(self._writer.past_ids(), max_past=service.max_records)
        self._slots: dict[int, tuple[int, str]] = {}  # every record in use: generation and request id
        self._live: dict[int, int] = {}  # dispatched and not released: slot -> generation
        self._waiting = CreditQueue(context.config.scheduler.arrivals_per_level)  # accepted, no credit yet
        self._tokenizer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._grammars = GrammarQueue(
            GrammarChecker(
                context.run_dir, timeout_s=service.grammar_timeout_s, memory_bytes=service.grammar_bytes
            )
        )  # fmt: skip
        self._from_beside: deque[Callable[[], None]] = deque()
        self._pending_bytes = 0
        self._next_scan = 0.0
        self._counts: Counter[str] = Counter()
        self._stats = StatsPublisher(context.page, self._collect)
        self._adopt_journal()
        self._bell = Bell()
        self._links = Links(context.run_dir, "prepare", epoch=context.epoch, peers=("execute",))
        self._router = self._links.router(
            submit_endpoint(context.run_dir, service), epoch=context.epoch, max_frame_bytes=service.max_frame_bytes
        )
        self._poller = Poller(self._links.inbox.socket, self._router.socket, self._bell.file)

    def run(self) -> None:
        try:
            while not self._context.stopping:
                self._poller.wait(self._stats.publish_if_due())
                self._turn()
        finally:
            self._tokenizer.shutdown(wait=False, cancel_futures=True)
            self._grammars.close()
            self._links.close()

    def _turn(self) -> None:
        self._bell.silence()
        self._receive()
        while self._from_beside:
            self._from_beside.popleft()()
        for _ in range(MAX_FRAMES_A_TURN):
            if (received := self._router.recv()) is None:
                break
            self._stats.changed = True
            self._hear_safely(*received)
        self._dispatch()

    # -- from the other workers

    def _adopt_journal(self) -> None:
        views = (read_request(self._journal, slot) for slot in range(self._journal.num_records))
        released = self._journal.release_states()
        for view in sorted((v for v in views if v is not None), key=lambda view: view.arrival):
            record = view.record
            self._slots[view.slot] = (view.generation, record.request_id)
            self._ids.accept(_accepted(record), record.digest)
            if released[view.slot] or record.token_capacity == 0:
                continue
            if view.state == ACCEPTED:
                self._wait_for_credit(view.slot, view.generation, record)
            else:  # execute takes it from the journal, so it need not be told again
                self._live[view.slot] = view.generation

    def _receive(self) -> None:
        for message in self._links.inbox.recv_all():
            match message:
                case m.Release():
                    for slot, generation in _pairs(message):
                        self._released(slot, generation)
                case m.Forgotten():
                    for slot, generation in _pairs(message):
                        self._forget(slot, generation)
        now = time.monotonic()
        if self._links.inbox.missed or now >= self._next_scan:
            self._links.inbox.missed = False
            self._next_scan = now + TICK_S
            self._scan()

    def _scan(self) -> None:
        """Learn from the journal what no message told."""
        states = self._journal.release_states()
        for slot in np.flatnonzero(states).tolist():
            if (known := self._slots.get(slot)) is not None:
                if states[slot] == RELEASED:
                    self._released(slot, known[0])
                elif states[slot] == FORGOTTEN:
                    self._forget(slot, known[0])

    def _released(self, slot: int, generation: int) -> None:
        """The request ended: it gives its credit back, or its place in the queue."""
        if self._live.get(slot) == generation:
            del self._live[slot]
            self._stats.changed = True
        elif self._waiting.remove(slot, generation):
            self._stats.changed = True

    def _forget(self, slot: int, generation: int) -> None:
        self._released(slot, generation)
        if self._slots.get(slot, (None, ""))[0] == generation and self._writer.recycle(slot, generation):
            self._ids.forget(self._slots.pop(slot)[1])
            self._stats.changed = True

    def _dispatch(self) -> None:
        while self._waiting and len(self._live) < self._card.max_live:
            slot, generation, record = self._waiting.pop()
            if is_released(self._journal, slot, generation):
                continue  # ended while it waited
            self._writer.dispatch(slot, generation, time.monotonic_ns())
            self._live[slot] = generation
            self._links.send("execute", m.Prepared(slot, generation, record))
            self._stats.changed = True

    def _wait_for_credit(self, slot: int, generation: int, record: RequestRecord) -> None:
        arrival = int(self._journal.records["arrival"][slot])
        self._waiting.push(slot, generation, record.to_bytes(), arrival=arrival, priority=record.priority)

    # -- from the clients

    def _hear_safely(self, peer: bytes, frame: bytes) -> None:
        try:
            self._hear(peer, frame)
        except Exception as error:  # a fault of ours that one message finds must not cost the others anything
            logger.exception("a message could not be handled")
            request_id = peek_request_id(frame)
            self._ids.refuse(request_id)
            self._refuse(peer, request_id, RequestError(f"the message could not be handled: {type(error).__name__}"))

    def _hear(self, peer: bytes, frame: bytes) -> None:
        received_ns = time.monotonic_ns()
        try:
            message = decode_public(frame, max_bytes=self._service.max_frame_bytes).message
        except BadFrame as error:
            self._refuse(peer, peek_request_id(frame), error)
            return
        match message:
            case m.Submit():
                self._submit(peer, message, len(frame), received_ns)
            case m.GetInfo():
                self._router.send(peer, m.Info(self._info()))
            case _:
                self._refuse(peer, "", BadFrame(f"{type(message).__name__} is not spoken at the submit socket"))

    def _submit(self, peer: bytes, message: m.Submit, num_bytes: int, received_ns: int) -> None:
        request_id = message.request_id
        try:
            check_request_id(request_id)
            digest = digest_of(message.request)
            if self._ids.seen(request_id, digest):
                if (accepted := self._ids.answer(request_id)) is not None:
                    self._router.send(peer, accepted)
                return
            self._check_room(num_bytes)
            request = GenerationRequest.from_wire(message.request)
        except RequestError as error:
            self._refuse(peer, request_id, error)
            return
        intake = Intake(peer, request_id, digest, num_bytes, request, received_ns)
        self._ids.begin(request_id, digest)
        if (form := request.structured) is not None:
            self._pending_bytes += num_bytes
            self._grammars.compile(form, lambda result: self._later(lambda: self._compiled(intake, result)))
        else:
            self._tokenize_soon(intake)

    def _compiled(self, intake: Intake, result: str | RequestError) -> None:
        self._pending_bytes -= intake.num_bytes
        if isinstance(result, RequestError):
            self._stats.changed = True
            self._finish(intake, result)
        else:
            intake.grammar = result
            self._tokenize_soon(intake)

    def _tokenize_soon(self, intake: Intake) -> None:
        if intake.num_bytes <= INLINE_BYTES:
            self._finish(intake, self._tokenize(intake))
        else:
            self._pending_bytes += intake.num_bytes
            self._tokenizer.submit(self._tokenize_beside, intake)

    def _later(self, work: Callable[[], None]) -> None:
        """Any thread: do this in the next turn."""
        self._from_beside.append(work)
        self._bell.ring()

    def _check_room(self, num_bytes: int) -> None:
        if self._context.board.mode != RUN:
            raise Draining("the pipeline is stopping and takes no new requests")
        if len(self._waiting) >= self._service.max_queue:
            raise Overloaded(f"{len(self._waiting)} requests wait, the limit is {self._service.max_queue}")
        if num_bytes > INLINE_BYTES and self._pending_bytes + num_bytes > self._service.max_pending_bytes:
            raise Overloaded(
                f"{self._pending_bytes} bytes of prompts wait for the tokenizer,"
                f" {num_bytes} more pass the limit of {self._service.max_pending_bytes}"
            )

    def _tokenize_beside(self, intake: Intake) -> None:
        result = self._tokenize(intake)
        self._later(lambda: self._finish_beside(intake, result))

    def _finish_beside(self, intake: Intake, result: Admission | RequestError) -> None:
        self._pending_bytes -= intake.num_bytes
        self._stats.changed = True
        self._finish(intake, result)

    def _tokenize(self, intake: Intake) -> Admission | RequestError:
        """Any thread. A request that cannot be served is an error for its client and for nobody else."""
        intake.tokenize_start_ns = time.monotonic_ns()
        try:
            request = intake.request
            token_ids = self._encoder.encode_request(request)
            return admit(
                token_ids,
                truncation=request.truncation,
                params=request.sampling,
                card=self._card,
                max_prompt_tokens=request.max_prompt_tokens,
            )
        except RequestError as error:
            return error
        except Exception as error:
            logger.exception("request %s could not be prepared", intake.request_id)
            return RequestError(f"the request could not be prepared: {type(error).__name__}")
        finally:
            intake.tokenize_end_ns = time.monotonic_ns()

    def _finish(self, intake: Intake, result: Admission | RequestError) -> None:
        try:
            if isinstance(result, RequestError):
                raise result
            self._accept(intake, result)
        except RequestError as error:
            self._ids.refuse(intake.request_id)
            self._refuse(intake.peer, intake.request_id, error)

    def _accept(self, intake: Intake, admission: Admission) -> None:
        request, params = intake.request, intake.request.sampling
        record = RequestRecord(
            request_id=intake.request_id,
            digest=intake.digest,
            prompt=admission.token_ids.astype("<i4").tobytes(),
            num_truncated_tokens=admission.num_truncated,
            token_capacity=admission.capacity,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            lease_s=request.lease_s or self._service.lease_s,
            priority=request.priority,
            cache_salt=request.cache_salt,
            deadline_at=intake.time_after(request.deadline_ms),
            queue_deadline_at=intake.time_after(request.max_queue_ms),
            return_prompt=request.return_prompt,
            sampling=params.to_wire(),
            grammar=intake.grammar,
        )
        times = AcceptTimes(
            intake.received_ns, intake.tokenize_start_ns, intake.tokenize_end_ns, time.monotonic_ns()
        )  # fmt: skip
        slot, generation = self._writer.accept(record, times)
        self._slots[slot] = (generation, record.request_id)
        accepted = _accepted(record)
        self._ids.accept(accepted, record.digest)
        if record.token_capacity > 0:  # one that asked for no tokens is answered by summarize alone
            self._wait_for_credit(slot, generation, record)
        self._counts["accepted"] += 1
        self._counts["prompt_tokens"] += accepted.num_prompt_tokens
        self._router.send(intake.peer, accepted)

    def _refuse(self, peer: bytes, request_id: str, error: RequestError) -> None:
        self._counts[f"rejected_{error.code}"] += 1
        self._router.send(peer, m.Rejected(request_id[:100], error.code, error.message, error.param))

    def _info(self) -> dict[str, Any]:
        service = self._service
        limits = {
            "max_queue": service.max_queue,
            "max_frame_bytes": service.max_frame_bytes,
            "window_tokens": service.window_tokens,
            "lease_s": service.lease_s,
        }
        return {"model": self._card.to_wire(), "limits": limits}

    def _collect(self) -> dict[str, Any]:
        return {
            "waiting": len(self._waiting),
            "live": len(self._live),
            "max_live": self._card.max_live,
            "pending_bytes": self._pending_bytes,
            "records_used": len(self._slots),
            "records_free": self._writer.num_free,
            "bad_frames": self._router.num_bad_frames,
            "accepted": self._counts["accepted"],
            "prompt_tokens": self._counts["prompt_tokens"],
            "rejected": {
                name.removeprefix("rejected_"): count
                for name, count in self._counts.items()
                if name.startswith("rejected_")
            },
        }


def _accepted(record: RequestRecord) -> m.Accepted:
    return m.Accepted(
        record.request_id, len(record.prompt) // 4, record.num_truncated_tokens, record.token_capacity
    )  # fmt: skip


def _pairs(message: m.Release | m.Forgotten) -> list[tuple[int, int]]:
    slots = np.frombuffer(message.slots, "<u4").tolist()
    return list(zip(slots, np.frombuffer(message.generations, "<u4").tolist(), strict=True))
