"""The execute worker: the step loop."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
from typing import Any

from ...protocol import messages as m
from ...protocol.errors import JournalError, Poisoned
from ...protocol.journal.deaths import held_against, num_deaths, poisoned
from ...protocol.journal.layout import DISPATCHED
from ...protocol.journal.releases import is_released
from ...protocol.journal.requests import RequestView, read_request
from ...protocol.journal.tokens import read_finish
from ...protocol.model_card import ModelCard
from ...protocol.reasoning import Tags, from_wire
from ...protocol.record import RequestRecord
from ...protocol.record_key import keys_in
from ..process import StatsPublisher, Ticks, WorkerContext
from .bookkeeping import Bookkeeper
from .engine import Engine, StepOutputs
from .grammar.intake import GrammarIntake
from .grammar.matcher import GrammarCompiler, ReasoningLimit
from .loading import load_runner, make_scheduler, settle_interval_ms
from .loading import preload as preload
from .patience import Patience
from .quarantine import Quarantine
from .reports import Reports
from .scheduling.audit import measure_memory
from .scheduling.pooling import Pooling
from .scheduling.sequence import Key, Sequence
from .served_adapters import ServedAdapters
from .showing import Showing
from .step import Runner
from .step_intent import StepIntent
from .trace import StepTrace, open_trace

logger = logging.getLogger(__name__)

IDLE_STEP_S = 0.001  # wait if there is work but no step can be planned, which the scheduler rules out
COMPILE_S = 30.0  # on a GPU, a step may be the first to need some kernel or graph
PREPARE_S = 0.001  # at a time, for preparations while idle: a request that arrives meanwhile waits
LOOK_S = 0.01  # interval at which statistics, view and heartbeat are updated between short steps


def run(context: WorkerContext) -> None:
    context.set_phase("loading")
    runner, card, step_s = load_runner(context)
    if not context.stopping:
        execute = Execute(context, runner, card, step_s=step_s)
        context.set_phase("ready")
        execute.run()


class Execute:
    """Runs steps as long as there is work, and otherwise waits for a message.

    Everything it holds is in the journal too: after a restart it adopts every request that prepare dispatched and
    summarize did not release, with the output tokens it has, and continues. Only the last short steps may be missing
    from the journal: their tokens were not reported yet, and are computed again, with the same result.
    """

    def __init__(self, context: WorkerContext, runner: Runner, card: ModelCard, *, step_s: float) -> None:
        self._context = context
        self._journal = context.journal
        scheduler = make_scheduler(context.config, card, runner)
        self._trace_file = open_trace(context.config.scheduler.trace)
        trace = None
        if self._trace_file is not None:
            trace = StepTrace(self._trace_file, scheduler, model=card.model, secret=secrets.token_bytes(16))
        # With a trace, steps do not overlap: it records them one by one, so that they can be replayed.
        overlaps = context.config.model.overlap and runner.overlaps and trace is None
        depth = int(overlaps)
        self._engine = Engine(scheduler, runner, clock=context.journal.now_ns, depth=depth, trace=trace)
        self._runner = runner
        self._has_preparations = True
        # After repeated crashes one request is served at a time: slow, but no request can harm another.
        self._is_degraded = context.board.is_degraded
        self._max_live = 1 if self._is_degraded else card.max_live
        self._search: tuple[int, int] | None = None  # the latest beam search adopted
        num_alone = 1 + depth + (scheduler.config.num_speculative_tokens or 0)
        self._quarantine = Quarantine(context.journal, num_steps=num_alone)
        self._intent = StepIntent(context.intent)
        self._flushes = context.config.service.flushes_steps
        self._adapters, self._vocab_size = ServedAdapters(card, runner, context.run_dir), card.vocab_size
        self._books = Bookkeeper(
            context.journal,
            eos_token_ids=frozenset(card.eos_token_ids),
            adapters=self._adapters.numbers,
            pooling=Pooling(card.pooling, card.normalizes_embeddings),
        )
        self._held: dict[int, int] = {}  # adopted and not released: slot -> generation
        self._next_look = 0.0
        self._num_steps = 0
        self._num_tokens = 0
        self._num_prefill_tokens = 0
        self._stats = StatsPublisher(context.page, self._collect)
        least_s = COMPILE_S if card.device.startswith("cuda") else 0.0
        num_parts = runner.show_progress(context.page.progress_word)
        self._patience = Patience(context.page, full_step_s=step_s, num_parts=num_parts, least_s=least_s)
        self._showing = Showing(context.board.view, self._engine)
        self._links = context.links("summarize")
        self._ticks = Ticks(self._links.inbox)
        self._reports = Reports(self._links, interval_ms=settle_interval_ms(context.config, card))
        self._grammars = GrammarIntake(GrammarCompiler(context.run_dir, card), self._links.bell())
        self._poller = self._links.poller(self._grammars.bell.file, *context.stop_files)

    def run(self) -> None:
        try:
            while not self._context.stopping:
                self.wait()
                self.turn()
        finally:
            self._grammars.close()
            self._links.close()
            if self._trace_file:
                with contextlib.suppress(OSError):
                    self._trace_file.close()

    def wait(self) -> None:
        now = time.monotonic()
        if now < self._next_look and self._engine.has_work:
            return
        self._next_look = now + LOOK_S
        patience = self._stats.publish_if_due()
        self._showing.show_if_due()
        self._adapters.change_if_told(may_change=not (self._quarantine.is_on or self._is_degraded))
        if not self._engine.has_work:
            self._tell()
            due_s = 0.0 if self._quarantine.has_next else self._ticks.wait_s
            if self._has_preparations:
                self._has_preparations = self._runner.prepare(PREPARE_S)
                due_s = 0.0 if self._has_preparations else due_s
            self._poller.wait(min(patience, due_s))
            self._grammars.bell.silence()

    def turn(self) -> None:
        self._receive()
        if not self._engine.has_work:
            return
        self._launch()
        if self._engine.num_in_flight == 0:
            self._tell()
            self._poller.wait(IDLE_STEP_S)
            return
        outputs = self._engine.collect()
        self._books.record(outputs)
        self._intent.end()
        self._tell(next_in_s=self._next_in_s(outputs))
        if self._quarantine.is_on:
            self._put_back(self._quarantine.observe(outputs.plan, outputs.progress))
        self._count(outputs)

    def _next_in_s(self, outputs: StepOutputs) -> float:
        """Seconds until the next step is likely to complete; infinite if this one must be reported before."""
        progress, next_plan = outputs.progress, self._engine.latest_plan
        has_ends = progress.finished or progress.expired or progress.failed
        # Steps with prompts yield first tokens, and how long they take is unpredictable.
        has_prompts = outputs.plan.prefills or (next_plan is not None and next_plan.prefills)
        # If a suspect crashes the process again, its client gets only the tokens reported before.
        if has_ends or has_prompts or self._quarantine.is_on or not self._engine.has_work:
            return math.inf
        return (outputs.collected_at - outputs.began_at) / 1e9

    def _tell(self, *, next_in_s: float = math.inf) -> None:
        """Record and report the completed steps, unless they can wait for the one that completes in ``next_in_s``."""
        if self._reports.may_wait(next_in_s) or not (rows := self._books.take_rows()):
            return
        if self._flushes:
            self._context.flush_journal()
        self._reports.send(rows)

    def _launch(self) -> None:
        """Plan and launch all steps that may be in flight now; during quarantine, one at a time."""
        while self._engine.may_plan and not (self._quarantine.is_on and self._engine.num_in_flight):
            plan = self._engine.plan()
            if plan is None:
                return
            if plan.prefills:
                self._tell()
                running = self._engine.scheduler.running
                self._patience.begin(plan, scores=not all(running[chunk.key].is_scored for chunk in plan.prefills))
            self._intent.begin(plan, self._engine.scheduler.rows, num_ahead=self._books.num_unwritten)
            self._engine.launch(plan)

    def _receive(self) -> None:
        """Handle messages, releases first: they free the places that new requests were given credits for."""
        prepared = []
        for message in self._links.inbox.recv_all():
            match message:
                case m.Release():
                    for key in keys_in(message):
                        self._release(key)
                case m.Prepared():
                    prepared.append(message.slot)
        for slot in prepared:
            self._adopt(slot)
        self._take_compiled()
        if self._ticks.begin_if_due():
            self._scan()
        while unit := self._quarantine.next_unit():
            for slot, _ in unit:
                self._adopt(slot)

    def _scan(self) -> None:
        """Learn from the journal what no message reported."""
        self._scan_releases()
        journal = self._journal
        slots = journal.slots_in_use()
        self._books.drop_others(slots)
        wanted = (journal.states(slots) == DISPATCHED) & (journal.release_states(slots) == 0)
        missing = [slot for slot in slots[wanted].tolist() if not self._holds(slot)]
        for slot in sorted(missing, key=lambda slot: int(journal.records["arrival"][slot])):
            self._adopt(slot)

    def _scan_releases(self) -> None:
        for key in list(self._held.items()):
            if is_released(self._journal, *key) or not self._holds(key[0]):
                self._release(key)

    def _holds(self, slot: int) -> bool:
        return self._held.get(slot) == self._journal.generation(slot)

    def _adopt(self, slot: int) -> None:
        try:
            view = read_request(self._journal, slot)
        except JournalError:
            logger.exception("a record of the journal is damaged")
            return
        if view is None or self._holds(slot) or view.state != DISPATCHED:
            return
        against = held_against(self._journal, "execute", slot, view.generation)
        if self._quarantine.blocks((slot, view.generation)):
            return  # a scan adopts it when the quarantine is over
        if is_released(self._journal, slot, view.generation):
            return
        if self._num_live >= self._max_live or slot in self._held:
            self._scan_releases()  # the credit came from a request whose Release is still on its way
        if read_finish(self._journal, slot, view.generation) is not None:
            # NOTE: the end is the last thing written for a request: as soon as it is known, the record may be reused.
            self._held[slot] = view.generation  # until it is released
            return
        if not self._has_room(view):
            return  # a later scan adopts it
        self._books.write()  # ``begin_one`` resets the intent's count of unwritten steps
        self._intent.begin_one((slot, view.generation))
        sequence = self._books.adopt(view)
        self._intent.end_one()
        if num_deaths(self._journal, "execute", *sequence.key):
            sequence.chance = 0.0  # a proposal may have been the cause, and these are optional: make no more
        self._held[slot] = view.generation
        self._stats.changed = True
        self._continue(sequence, view, poisoned(against, "the request crashed the process that ran it, twice"))

    def _continue(self, sequence: Sequence, view: RequestView, refusal: Poisoned | None) -> None:
        """Begin with the request, or go on with it, unless it ends here."""
        reason = sequence.end_reason(len(sequence.tokens)) if sequence.num_output_tokens else None
        if refusal is not None:
            self._books.finish(sequence.key, "error", f"{refusal.code}\n{refusal.message}")
        elif error := self._unknown_adapter(view) or self._too_many_beams(view):
            self._books.fail(sequence.key, error)
        elif reason is not None:  # crashed after writing the last token, before writing the end
            self._books.finish(sequence.key, reason)
        else:
            self._quarantine.enter(sequence.key)
            self._begin(sequence, view.record)

    def _unknown_adapter(self, view: RequestView) -> str:
        """Why this request, accepted for an adapter that was unloaded or whose files have changed, cannot be served;
        empty if it can.
        """
        name, digest = view.record.lora, view.record.lora_digest
        return f"the adapter {name!r} is no longer served" if self._adapters.digest_of(name) != digest else ""

    def _too_many_beams(self, view: RequestView) -> str:
        """Why the search of this beam can never start, as its beams only run together; empty if it can."""
        params, limit = view.record.params, self._engine.scheduler.config.max_live
        if not params.is_beam_search or params.num_beams <= limit:
            return ""
        return f"num_beams is {params.num_beams}, which was accepted for more rows; the limit is max_live, {limit}, now"

    def _has_room(self, view: RequestView) -> bool:
        if self._num_live < self._max_live:
            self._search = view.group if view.record.params.is_beam_search else None
            return True
        # When degraded, one request runs at a time, but the beams of a search run together or not at all.
        return self._is_degraded and view.group == self._search

    def _begin(self, sequence: Sequence, record: RequestRecord) -> None:
        reasoning = from_wire(record.reasoning) if record.reasoning else None
        if record.grammar:
            self._grammars.add(sequence, record.grammar, reasoning)
            return
        if isinstance(reasoning, Tags):
            sequence.grammar = ReasoningLimit(reasoning, self._vocab_size)
        self._engine.add(sequence)

    @property
    def _num_live(self) -> int:
        return len(self._engine.scheduler.live) + len(self._grammars)

    def _take_compiled(self) -> None:
        for sequence, error in self._grammars.take_done():
            if error:
                self._books.fail(sequence.key, error)
                self._quarantine.forget(sequence.key)
            else:
                self._engine.add(sequence)

    def _release(self, key: Key) -> None:
        if self._held.get(key[0]) == key[1]:
            del self._held[key[0]]
            self._grammars.drop(key)
            self._engine.release(key)
            self._books.drop(key)
            self._stats.changed = True
            if self._quarantine.forget(key) or self._is_degraded:
                self._ticks.hasten()  # another request may be waiting for its place

    def _put_back(self, keys: list[Key]) -> None:
        """Put cleared suspects back: they wait with the other requests until all suspects are cleared."""
        live = self._engine.scheduler.live
        for key in [key for key in keys if key in live]:  # listed first: releasing one beam releases its whole search
            del self._held[key[0]]
            self._engine.release(key)
            self._books.put_back(key)
        if not self._quarantine.is_on:
            self._ticks.hasten()

    def _count(self, outputs: StepOutputs) -> None:
        elapsed_s = (outputs.collected_at - outputs.began_at) / 1e9
        self._patience.observe(outputs.plan, elapsed_s, ahead=self._engine.latest_plan)
        self._num_steps += 1
        self._num_tokens += len(outputs.progress.token_ids)
        self._num_prefill_tokens += outputs.plan.num_prefill_tokens
        self._stats.changed = True

    def _collect(self) -> dict[str, Any]:
        stats, history = self._engine.stats, self._engine.history.summary()
        memory = measure_memory(self._engine.scheduler)
        return {
            "steps": self._num_steps,
            "graph_steps": self._runner.num_graph_steps,
            "step_ms": self._patience.step_s * 1e3,
            "tokens": self._num_tokens,
            "prefill_tokens": self._num_prefill_tokens,
            "batch_tokens": history.mean_batch_tokens,
            "step_ms_median": history.median_step_ms,
            "step_ms_max": history.slowest_step_ms,
            "waiting": stats.num_waiting,
            "prefilling": stats.num_prefilling,
            "ready": stats.num_ready,
            "decoding": stats.num_decoding,
            "held": len(self._held),
            "suspects": len(self._quarantine),
            "swapped": stats.num_swapped,
            "preemptions": stats.num_preemptions,
            "swaps": stats.num_swaps,
            "pages": stats.num_pages,
            "pages_free": stats.num_free_pages,
            "pages_held": stats.num_held_pages,
            "pages_cached": stats.num_idle_pages,
            "pages_limbo": stats.num_limbo_pages,
            "pages_lost": stats.num_lost_pages,
            "pages_sharing": stats.sharing,
            "tokens_reserved": memory.num_reserved,
            "tokens_fragmented": memory.num_fragmented,
            "host_pages": stats.num_host_pages,
            "host_pages_free": stats.num_free_host_pages,
            "host_pages_cached": stats.num_idle_host_pages,
            "cache_queries": stats.num_queried_tokens,
            "cache_hits": stats.num_hit_tokens,
            "cache_hit_rate": stats.hit_rate,
            "proposed_tokens": stats.num_proposed_tokens,
            "accepted_tokens": stats.num_accepted_tokens,
        }
