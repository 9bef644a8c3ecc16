"""Decides what each step computes. Pure: no device, no clock, no sockets.

``plan`` reserves pages and lists the tokens of the next step; ``apply`` takes the tokens that the step sampled.
Sequences may be added and released at any time, also in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType

from ....protocol.config import SchedulerConfig
from .admission import Admission
from .ahead import LookAhead
from .beam_search import Candidates
from .beams import Beams, MakeSearch, make_search
from .cache import PageCache
from .chunks import is_repeated, next_chunk
from .cost import Work, make_pace
from .deadlines import Deadlines, exceeded
from .page_records import PageRecords
from .plan import Draft, Plan
from .policy import Phase, Skips, make_policy
from .progress import Progress
from .prompt_lookup import PromptLookup
from .proposals import CheckCosts, Proposals, Proposer
from .queues import may_overtake
from .roster import Roster
from .rows import Rows
from .sequence import Key, Sequence, SequenceState
from .shared_prompts import SharedPrompts
from .states import StatePool

MAX_FOLLOWERS = 64  # examined per step, so that a long queue does not make it slow
_NONE_FAILED: Mapping[Key, str] = MappingProxyType({})
_NO_BEAMS: Mapping[Key, Candidates] = MappingProxyType({})


class Scheduler:
    """Sequences from arrival to finish. The ``Roster`` keeps track of the state of each."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        page_size: int,
        num_pages: int,
        max_model_len: int,
        prefix_cache: bool = True,
        num_host_pages: int = 0,
        num_snapshots: int | None = None,  # of states of recurrent layers; None: the model has no such layers
        page_records: PageRecords | None = None,  # of what an earlier process has left in the pages
        replays: bool = False,  # after a preemption or a crash, output is decoded again instead of prefilled
        make_search: MakeSearch = make_search,
        proposer: Proposer | None = None,  # None: prompt lookup
        check_costs: CheckCosts | None = None,  # of proposals; None: those of the compiled kernels of a CPU
    ) -> None:
        self.config, self.replays = config, replays
        self.max_model_len = max_model_len
        self.policy = make_policy(config)
        states = None if num_snapshots is None else StatePool(config.max_live, num_snapshots * prefix_cache, page_size)
        self.cache = PageCache(
            num_pages, page_size, shares_prefixes=prefix_cache, num_host_pages=num_host_pages, states=states,
            records=page_records,
        )  # fmt: skip
        self.beams = Beams(self.cache, max_model_len, make_search)
        self.rows = Rows(config.num_rows, min(num_pages, self.cache.pages_for(max_model_len)))
        self.ahead = LookAhead(self.cache.states)
        self.roster = Roster(config, self.policy, self.cache, self.beams, self.rows, ahead=self.ahead)
        self.live, self.waiting, self.running = self.roster.live, self.roster.waiting, self.roster.running
        self._shared_prompts = SharedPrompts(self.roster.groups, page_size)
        self._admission = Admission(self.roster, max_model_len=max_model_len, margin=self.policy.margin)
        self._pace = make_pace(config, page_size)
        self.proposals = Proposals(
            config.num_speculative_tokens or 0,
            cache=self.cache,
            rows=self.rows,
            max_model_len=max_model_len,
            proposer=proposer or PromptLookup(),
            costs=check_costs or CheckCosts(),
        )
        self._deadlines = Deadlines()
        self._expired: list[tuple[Key, str]] = []  # not reported yet
        self._step = self.completed_step = 0
        self._skips = Skips()
        self._schedule = {
            Phase.DECODES: self._schedule_decodes,
            Phase.PROMPTS: self._schedule_prompts,
            Phase.WAITING: self._schedule_waiting,
        }

    def add(self, sequence: Sequence) -> None:
        """Queue ``sequence`` by its arrival. It may bring output tokens from before a crash."""
        assert sequence.key not in self.live, f"{sequence.key} is already live"
        self.proposals.expect(sequence)
        assert len(self.live) < self.config.max_live, f"{len(self.live)} live, the limit is {self.config.max_live}"
        assert sequence.num_tokens > 0, f"{sequence.key} has no tokens"
        sequence.replays = self.replays and not sequence.is_beam  # a search restarts from the prompt
        self.roster.add(sequence)
        self._deadlines.add(sequence)

    def release(self, key: Key) -> None:
        """``key`` is no longer needed: an unfinished sequence is aborted, a finished one gives its pages back.

        Idempotent; ignores unknown and stale keys.
        """
        if (sequence := self.live.get(key)) is not None:
            self.roster.retire(sequence, "abort")
        self.cache.release(key)

    def expire(self, now_ns: int) -> list[tuple[Key, str]]:
        """End sequences whose deadline has passed; returns them with the reason. The next plan reports them."""
        expired = []
        for key in self._deadlines.due(now_ns):
            sequence = self.live.get(key)
            if sequence is not None and (why := exceeded(sequence, now_ns, num_awaited=key in self.ahead.carried_rows)):
                self.roster.retire(sequence, "error")
                expired.append((key, why))
        self._deadlines.tidy(self.live)
        self._expired += expired
        return expired

    def plan(self) -> Plan | None:
        """The next step, its pages reserved; None if there is nothing to do."""
        draft = Draft(self._step + 1, self.config.token_budget, self.config.max_kv_reads or math.inf)
        draft.expired, self._expired = self._expired, []
        self._seat_ready()
        self._limit_prefill(draft)
        for phase in self.policy.phases(self._fill, self._skips):
            self._schedule[phase](draft)
        if draft.is_empty:
            self._break_stall(draft)
        self._count_skips(draft)
        self.proposals.add(draft, self.running, are_tokens_known=not self.ahead.is_under_way)
        self.cache.states.mark(draft.prefills.values(), self.running)
        plan = draft.finish(self.cache.take_moves())
        if plan is not None:
            self._step = plan.step
        return plan

    def apply(
        self,
        plan: Plan,
        token_ids: list[int],
        failed: Mapping[Key, str] = _NONE_FAILED,
        candidates: Mapping[Key, Candidates] = _NO_BEAMS,
    ) -> Progress:
        """Apply the result of a step: one of ``token_ids`` for each of ``plan.sampled``; beams have ``candidates``.

        A token after a wrong proposal is only what the model would have said had the proposal been right.

        Sequences in ``failed`` end here, each for its reason; tokens of released sequences are dropped.
        """
        self.advance(plan)
        self.ahead.settle()
        self.completed_step = plan.step
        progress = Progress(finished=dict(plan.finished), expired=dict(plan.expired), failed=dict(plan.failed))
        sampled, computing = iter(token_ids), self.roster.groups.computing
        for key, start, num_tokens, samples, proposed in plan.chunks:
            token_id = next(sampled) if samples else None
            behind = tuple(islice(sampled, len(proposed))) if proposed else ()
            sequence = self.running.get(key)
            if sequence is None:
                continue
            if (why := failed.get(key)) is not None:
                progress.failed[key] = why
                sequence.num_tokens -= samples and not sequence.is_beam  # its placeholder
                self.roster.retire(sequence, "error", is_sound=False)
                continue
            self._publish(sequence)
            if key in computing:
                self.waiting.unhold(self.roster.groups.compute(sequence))
            sequence.note_computed(start + num_tokens)
            if candidates and key in candidates:
                self.roster.branch(sequence, candidates[key], progress)
            elif token_id is not None:
                self._take(sequence, token_id, progress)
                if proposed:
                    right = self.proposals.check(sequence, proposed, (token_id, *behind))
                    self._take_proposed(sequence, right, progress)
            elif sequence.is_complete:
                progress.finished[key] = "length"
                self.roster.retire(sequence, "length")
        self.cache.complete(plan.step)
        return progress

    def advance(self, plan: Plan) -> None:
        """Count ``plan`` as computed, with placeholders for its tokens, which ``apply`` fills in."""
        for sequence in self.ahead.advance(plan, self.running):
            if sequence.is_full(self.max_model_len):
                if sequence.row is not None:
                    self.rows.leave(sequence)
                sequence.state = SequenceState.ENDING
            elif sequence.state is SequenceState.PREFILLING:
                sequence.state = SequenceState.READY

    def observe(self, plan: Plan, elapsed_ns: int) -> None:
        """Report how long a step took. Used only with ``itl_target_ms``."""
        if self._pace is not None and plan.chunks:
            self._pace.observe(plan, elapsed_ns)

    def _seat_ready(self) -> None:
        """Give rows that are free, or that the policy takes back, to sequences whose prompt is computed."""
        ready = self.roster.in_state(SequenceState.READY)
        if not ready:
            return
        num_missing = len(ready) - self.rows.num_free
        if num_missing > 0:
            for sequence in self.policy.yield_rows(self.rows.seated, num_missing):
                self.rows.leave(sequence)
                sequence.state = SequenceState.READY
        for sequence in ready[: self.rows.num_free]:
            self.rows.seat(sequence)
            sequence.state = SequenceState.DECODING

    def _limit_prefill(self, draft: Draft) -> None:
        """Limit prompt tokens so that decodes do not wait long, or meet their target."""
        decoding = self.rows.seated
        if not decoding:
            return
        draft.num_prefill_left = self.config.mixed_prefill_tokens or math.inf
        if self._pace is None:
            return
        under_way = self.roster.in_state(SequenceState.PREFILLING)
        num_reads = sum(s.num_tokens for s in decoding) + sum(s.num_computed_tokens for s in under_way[:1])
        must_progress = self._skips.prefills >= self.config.max_prefill_skip
        num_checked = 0 if self.ahead.is_under_way else self.proposals.num_due_beside_prompts
        rest = Work(0, len(decoding) + num_checked, num_reads)
        limit = self._pace.max_prefill_tokens(rest, must_progress=must_progress)
        if limit is not None:
            draft.num_prefill_left = min(draft.num_prefill_left, limit)

    def _schedule_decodes(self, draft: Draft) -> None:
        """One token each; if the budgets do not suffice, the sequences take turns."""
        if draft.prefills and not self.policy.decodes_join(self._fill, self._skips):
            return
        turn = self.rows.take_turns(draft.num_tokens_left, max_reads=draft.num_reads_left, at_least_one=draft.is_empty)
        for sequence in turn:
            preempted_for_another = sequence.row is None
            if not preempted_for_another and self._make_room(sequence, draft):
                draft.schedule(sequence, 1)

    def _schedule_prompts(self, draft: Draft) -> None:
        """Chunks of the prompts under way, until one does not fit."""
        for sequence in self.roster.in_state(SequenceState.PREFILLING):
            if sequence.key not in draft.prefills and not self._schedule_chunk(sequence, draft):
                return

    def _schedule_waiting(self, draft: Draft) -> None:
        """First chunks in queue order, until memory holds one back; a limited number may overtake it.

        A sequence whose prompt begins with tokens that another one is computing is skipped until these are cached.
        """
        if not self.waiting or len(draft.prefills) < len(self.roster.in_state(SequenceState.PREFILLING)):
            return  # nothing waits, or a prompt under way did not fit
        computing = [s for s in self.running.values() if self.cache.awaits_prompt_pages(s)]
        held_back: list[Sequence] = []
        followers: list[Sequence] = []
        while (head := self.waiting.head) and draft.room(head, 1) and may_overtake(held_back, self.config):
            if self._settle(head, draft):
                continue
            # A sequence preempted in this step must not restart in it: two could preempt each other forever.
            if draft.preempted:
                break
            is_examined = bool(computing) and len(followers) < MAX_FOLLOWERS
            found = self._shared_prompts.examine(head, computing) if is_examined else None
            if is_examined and head.leader is not None:
                followers.append(head)
                self.waiting.remove(head.key)
            elif (match := self._admission.may_start(head, found)) is not None:
                for started in self.roster.start(head, match, draft):
                    if self.cache.awaits_prompt_pages(started):
                        computing.append(started)
                    if started.state is SequenceState.PREFILLING:
                        self._schedule_chunk(started, draft)
                for sequence in held_back:
                    sequence.num_overtaken += 1
            else:
                draft.lacks_memory = True
                if not self.config.skip_ahead:
                    break
                held_back.append(head)
                self.waiting.remove(head.key)
        for sequence in (*held_back, *followers):
            if sequence.key not in self.waiting:
                self.roster.enter_queue(sequence)

    def _schedule_chunk(self, sequence: Sequence, draft: Draft) -> bool:
        chunk = next_chunk(sequence, max_tokens=self.config.chunk_tokens)
        wanted = draft.room(sequence, chunk)
        is_urgent = not draft.prefills and (draft.is_empty or self._skips.prefills >= self.config.max_prefill_skip)
        if wanted < chunk and is_repeated(sequence):  # it must have the same chunks as the first time
            if not is_urgent:
                return False
            draft.num_prefill_left = max(draft.num_prefill_left, chunk)  # decodes may limit it now that did not then
            wanted = draft.room(sequence, chunk)
        num_tokens = self.cache.extend(sequence, wanted) if wanted else 0
        if num_tokens:
            draft.schedule(sequence, num_tokens)
        draft.lacks_memory |= num_tokens < wanted
        return num_tokens > 0

    def _break_stall(self, draft: Draft) -> None:
        """Half-computed prompts hold all pages and none can progress: the earliest takes from the latest."""
        prefilling = self.roster.in_state(SequenceState.PREFILLING)
        draft.num_prefill_left = math.inf  # this step has no decodes to keep short for
        if prefilling and self._make_room(prefilling[0], draft):
            self._schedule_chunk(prefilling[0], draft)

    def _count_skips(self, draft: Draft) -> None:
        """Count the skips for lack of budget: a group skipped too often goes first once, see ``Policy.phases``."""
        has_prompts = bool(self.waiting) or bool(self.roster.in_state(SequenceState.PREFILLING))
        self._skips = self._skips.after(
            prefills=has_prompts and not draft.prefills and not draft.lacks_memory,
            decodes=len(draft.decodes) < len(self.rows),
        )

    def _settle(self, sequence: Sequence, draft: Draft) -> bool:
        """End a waiting sequence if it needs no step, or can never have one; whether it did."""
        if verdict := self._admission.judge(sequence):
            draft.end(sequence.key, *verdict)
            self.roster.retire(sequence, verdict.reason)
        return verdict is not None

    def _make_room(self, sequence: Sequence, draft: Draft) -> bool:
        """A place for the next token, taken from others if needed; False if ``sequence`` is preempted or ends.

        While a step is in flight no sequence is preempted: it could not be recomputed without all of its tokens.
        """
        num_pages = len(sequence.block_table)
        while not self.cache.extend(sequence, 1):
            if self.ahead.is_under_way:
                return False
            if num_pages == self.cache.num_pages:
                self.roster.retire(sequence, "length")  # it alone fills the pool
                draft.end(sequence.key, "length")
                return False
            self.roster.preempt(self.policy.victim(self.running.values()), draft)
            if sequence.key not in self.running:
                return False
        if sequence.row is not None and len(sequence.block_table) > num_pages:
            self.rows.write_pages(sequence, num_pages)
        return True

    def _take(self, sequence: Sequence, token_id: int, progress: Progress) -> None:
        sequence.tokens[sequence.num_tokens - 1] = token_id
        progress.emit(sequence.key, sequence.num_output_tokens - 1, token_id)
        if reason := sequence.end_reason(self.max_model_len):
            progress.finished[sequence.key] = reason
            self.roster.retire(sequence, reason)

    def _take_proposed(self, sequence: Sequence, token_ids: tuple[int, ...], progress: Progress) -> None:
        """Take the tokens after right proposals, whose inputs are therefore computed, until one ends the sequence."""
        for token_id in token_ids:
            if sequence.finish_reason is not None:
                return
            sequence.num_computed_tokens += 1
            sequence.append(token_id)
            self._publish(sequence)
            self._take(sequence, token_id, progress)
        self.proposals.give_back(sequence)

    def _publish(self, sequence: Sequence) -> None:
        """Make the pages that it has filled available to others."""
        if self.cache.publish(sequence) and sequence.row is not None:
            self.rows.write_pages(sequence, 0)

    @property
    def _fill(self) -> float:
        """The share of the rows that is taken, or would be if there were enough."""
        return (len(self.rows) + len(self.roster.in_state(SequenceState.READY))) / self.config.num_rows
