"""Invariants checked after every turn, at every end, and when the pipeline is at rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from triptych.protocol.errors import JournalError
from triptych.protocol.journal.layout import DISPATCHED, FREE, Words, split_word
from triptych.protocol.journal.requests import RequestView, read_request
from triptych.protocol.journal.salvage import salvage
from triptych.protocol.journal.tokens import read_tokens
from triptych.protocol.request_ids import SEPARATOR
from triptych.workers.execute.process import Execute

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.requests import Request
    from tests.simulation.users import Reader
    from tests.simulation.world import World
    from triptych.workers.execute.engine import Engine


class Violation(BaseException):
    """An invariant was violated. Derived from BaseException, so that no handler catches it."""


class _Column:
    """One word of every record; records in which it changed are checked."""

    def __init__(self, words: Words, check: Callable[[int], None]) -> None:
        self._words, self._check = words, check
        self._before = words.tolist()

    def look(self) -> bool:
        """Whether any of them has changed since the last look."""
        now = self._words.tolist()
        if now == self._before:
            return False
        changed = [slot for slot, (old, new) in enumerate(zip(self._before, now, strict=True)) if old != new]
        self._before = now
        for slot in changed:
            self._check(slot)
        return True


class Checks:
    def __init__(self, world: World) -> None:
        self._world = world
        self.alarms: list[str] = []  # errors logged by workers
        self.num_ends = 0
        journal = world.journal
        self._watched = [
            _Column(journal.prepare_words, self._check_request),
            _Column(journal.tokens_words, self._check_tokens),
            _Column(journal.release_words, self._check_release),
        ]
        self._views: dict[int, RequestView] = {}  # by slot, as published
        self._engine_state: tuple[object, ...] = ()  # when it was last checked
        self._tokens: dict[tuple[int, int], list[int]] = {}  # for each record and generation, as first published
        self._ends: dict[tuple[int, int], tuple[int, int]] = {}

    # -- after every turn

    def after(self, process: Process) -> None:
        if self.alarms:
            raise Violation(f"{process.name} logged an error: {self.alarms[0]}")
        body = getattr(process, "body", None)
        if isinstance(body, Execute):
            self._look_into_engine(body._engine)
            body._runner.check()  # type: ignore[attr-defined]
        if process.has_stored:
            process.has_stored = False
            self._look_into_journal()

    def _look_into_engine(self, engine: Engine) -> None:
        """Nothing is lost. Most turns are waits, which change nothing, so they are skipped."""
        scheduler = engine.scheduler
        pool, step = scheduler.cache.pool, (scheduler._step, scheduler.completed_step)
        state = (engine, step, tuple(scheduler.live), pool.num_free, pool.num_idle, scheduler.cache.limbo.num_pages)
        if state != self._engine_state:
            engine.check()
            self._engine_state = state

    def _look_into_journal(self) -> None:
        has_changed = [column.look() for column in self._watched]
        if has_changed[0] or has_changed[2]:
            self._check_credits()

    def before_tokens(self, slots: int | npt.NDArray[np.int64]) -> None:
        """execute writes tokens only of requests that it holds and that have not ended."""
        for slot in np.atleast_1d(slots).tolist():
            generation, state = split_word(self._world.journal.prepare_words[slot])
            if state != DISPATCHED:
                raise Violation(f"tokens for record {slot}, whose state is {state}")
            if split_word(self._world.journal.finish_words[slot])[0] == generation:
                raise Violation(f"tokens for record {slot} after its end")

    def _check_credits(self) -> None:
        """At most max_live requests are with execute, unless old records are back, and no id is live twice."""
        journal = self._world.journal
        states, released = journal.states(), journal.release_states()
        num_live = int(((states == DISPATCHED) & (released == 0)).sum())
        limit = self._world.card.max_live
        is_kept = num_live <= limit or self._world.disk.num_failures > 0
        self._require(is_kept, f"{num_live} requests are dispatched and not released, the limit is {limit}")
        used = np.flatnonzero(states != FREE)
        ids = journal.records["request_id"][used].tolist()
        self._require(len(set(ids)) == len(ids), f"an id is live twice: {ids}")

    def _check_request(self, slot: int) -> None:
        """The journal contains only valid requests, as their clients sent them."""
        view = self._view(slot)
        if view is None:
            self._views.pop(slot, None)
            return
        self._views[slot] = view
        request = self._request(view.record.request_id)
        self._require(request is not None and request.is_valid, f"{view.record.request_id} must not be in the journal")
        assert request is not None
        self._require(
            view.record.prompt_ids.tolist() == request.prompt, f"{request.request_id}: another prompt in the journal"
        )
        if request.by_adapter:
            digest = view.record.lora_digest
            self._require(digest in request.by_adapter, f"{request.request_id}: accepted for the adapter {digest!r}")
            request.take_answer(request.by_adapter[digest])

    def _check_tokens(self, slot: int) -> None:
        """Published tokens never change, and are a prefix of the one right answer."""
        view = self._views.get(slot) or self._view(slot)
        tokens = None if view is None else read_tokens(self._world.journal, view)
        if view is None or tokens is None:
            return
        key, now = (slot, view.generation), tokens.tolist()
        before = self._tokens.get(key, [])
        name = view.record.request_id
        request = self._request(name)
        assert request is not None
        # A search cut short starts again, even if some of its hypotheses were written already.
        has_begun_anew = request.is_beam_search and not now
        self._require(now[: len(before)] == before or has_begun_anew, f"{name}: published tokens {before} became {now}")
        self._require(len(now) <= view.record.token_capacity, f"{name}: {len(now)} tokens")
        self._require(request.journaled[: len(now)] == now, f"{name}: {now} published, expected {request.journaled}")
        self._tokens[key] = now

    def _check_release(self, slot: int) -> None:
        """A written end never changes, and neither does its request."""
        self._view(slot)
        entry = self._world.journal.records[slot]
        generation = int(entry["release_word"]) >> 32
        end = int(entry["end_tokens"]), int(entry["end_reason"])
        before = self._ends.setdefault((slot, generation), end)
        self._require(before == end, f"record {slot}: the end {before} became {end}")

    # -- at every end

    def end(self, reader: Reader, end: str) -> None:
        self.num_ends += 1
        request = reader.request
        name = request.request_id
        if end == "stop" and request.may_be_cut and "\ufffd" in str(request.wire.get("stop")):
            return  # a half character at which an abort ended it is shown as U+FFFD, which then is the stop string
        if end in ("stop", "length"):
            output = (end, reader.token_ids, reader.text)
            expected = [(each.reason, each.token_ids, each.text) for each in reader.expected]
            self._require(output in expected, f"{name} ended with {output}, expected {expected}")
        elif end == "abort":
            # A refused client aborts the request accepted from a late repetition of its SUBMIT, and cannot know
            # that another client has taken the id meanwhile.
            self._require(request.may_abort or request.was_refused, f"{name} was aborted by no client")
        elif end == "deadline_exceeded":
            self._require(request.may_expire, f"{name} has no deadline and passed it")
        elif end == "model_failed":
            self._require("not served" not in str(reader.error), f"{name} was accepted, and then: {reader.error}")
            self._require(request.is_poison or request.has_failed, f"{name} failed by itself: {reader.error}")
        elif end == "poisoned":
            self._require(
                request.is_killer or self._world.num_chance_deaths > 0,
                f"{name} crashes no worker and was called poisoned",
            )
        elif end == "pipeline_failed":
            self._require(self._world.num_give_ups > 0, f"{name} failed with a pipeline that did not")
        elif end == "invalid_request" and reader.error is not None and reader.error.param == "lora":
            self._require(self._may_be_gone(reader), f"{name} was refused: {reader.error}")
            self._refused(request)
        elif end == "invalid_request":
            self._require(not request.is_valid, f"{name} is valid and was refused: {reader.error}")
        elif end in ("unknown_id", "duplicate_id"):
            self._require(request.may_be_unknown, f"{name} got {end}: {reader.error}")
            # A client without any token resubmits instead: either it was answered, or it is computed again.
            is_alone = len(request.kin) == 1 and SEPARATOR not in name  # choices may end one by one
            may_resubmit = is_alone and not (reader.has_resumed or reader.token_ids or request.may_be_cut)
            self._require(end != "unknown_id" or not may_resubmit, f"{name} was accepted and got {end}")
        elif end == "draining":
            self._require(self._world.plan.may_drain, f"{name} was refused as draining")
            self._refused(request)
        else:
            self._require(end == "overloaded", f"{name} got {end}: {reader.error}")
            self._refused(request)

    def _may_be_gone(self, reader: Reader) -> bool:
        """Whether its adapter was unavailable at some moment since it was submitted."""
        drivers, lora = self._world.drivers, reader.request.wire.get("lora", "")
        return drivers is not None and drivers.was_gone(lora, since_ns=reader.began_ns)

    def _refused(self, request: Request) -> None:
        for each in request.kin:
            each.was_refused = True

    def failing(self, key: tuple[int, int]) -> None:
        """Called when a token of this request cannot be sampled."""
        view = self._views.get(key[0])
        if view is not None and view.generation == key[1]:  # otherwise it was released while the step was computed
            for each in self._world.requests[view.record.request_id].kin:
                each.has_failed = True

    def killing(self, prompt: list[int]) -> None:
        """Called when a request crashes a worker: it must be poisoned after two crashes seen by one driver, whose last
        one a power failure may undo.
        """
        request = next(r for r in self._world.requests.values() if r.is_killer and r.prompt == prompt)
        request.num_killings += 1
        limit = 1 + self._world.num_drivers + self._world.disk.num_failures
        self._require(request.num_killings <= limit, f"{request.request_id} killed {request.num_killings} workers")

    def salvage(self, *, power_fails: bool) -> None:
        """As a driver does: it finds no damage after a kill, unless a request was being written."""
        if power_fails:  # what was not flushed may be computed again, and end in another way
            self._world.disk.fail()
            self._tokens.clear()
            self._ends.clear()
        lines = salvage(self._world.journal)
        found = [line for line in lines if not line.endswith("the last record of its request was never published")]
        self._require(self._world.disk.num_failures > 0 or not found, f"a driver finds damage: {found}")

    # -- at rest

    def is_at_rest(self) -> bool:
        return not self.what_is_open()

    def what_is_open(self) -> list[str]:
        world = self._world
        waiting = [f"{client.name} waits" for client in world.clients if client.is_waiting]
        if world.drivers is not None and world.drivers.current.is_busy:
            waiting.append("the driver is busy")
        if world.clock.now_ns < world.paused_until_ns:
            waiting.append("everything is paused")
        if world.has_given_up:
            return waiting  # no one reports that a given-up execute has stopped writing, so records stay in use
        slots = np.flatnonzero(world.journal.states() != 0).tolist()
        down = [role for role in ("prepare", "execute", "summarize") if role not in world.workers]
        return waiting + [f"record {slot} is in use" for slot in slots] + [f"{role} is down" for role in down]

    def at_rest(self) -> None:
        """No process holds anything of any request."""
        if self._world.drivers is not None and not self._world.has_given_up:
            self._world.drivers.check_at_rest()
        for role, worker in self._world.workers.items():
            if self._world.has_given_up:
                return
            body = worker.body
            if role == "prepare":
                figures = body._collect()
                left = {k: figures[k] for k in ("waiting", "live", "records_used", "pending_bytes") if figures[k]}
            elif role == "execute":
                figures = body._collect()
                names = ("held", "waiting", "decoding", "pages_limbo", "pages_held", "pages_lost", "swapped")
                left = {k: figures[k] for k in names if figures[k]}
                num_free = figures["pages_free"] + figures["pages_cached"]
                if num_free != figures["pages"]:
                    left["pages"] = figures["pages"] - num_free
            else:
                left = {k: body._collect()[k] for k in ("live", "unread") if body._collect()[k]}
            self._require(not left, f"{worker.name} holds {left} at rest")

    def _view(self, slot: int) -> RequestView | None:
        try:
            return read_request(self._world.journal, slot)
        except JournalError as error:
            raise Violation(str(error)) from error

    def _request(self, request_id: str) -> Request | None:
        return self._world.requests.get(request_id)

    def _require(self, condition: bool, text: str) -> None:
        if not condition:
            raise Violation(text)
