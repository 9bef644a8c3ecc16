"""Keeps track of every live sequence, and moves it between queue, running and finished as the scheduler decides.

A sequence waits in the queue, runs, and may be preempted in between. Each move takes along what belongs to the old
state: the row, the pages, the siblings held for it.
"""

from __future__ import annotations

from ....protocol.config import SchedulerConfig
from .ahead import LookAhead
from .beam_search import Candidates
from .beams import Beams
from .cache import PageCache
from .chunks import state_at_start
from .groups import Groups
from .plan import Draft, Start
from .policy import Policy, make_preemption
from .prefix import Match
from .progress import Progress
from .queues import WaitingQueue
from .rows import Rows
from .sequence import Key, Sequence, SequenceState


class Roster:
    """The live sequences.

    Invariant: a live sequence is either in ``waiting`` and holds no page of the device, or in ``running``. Those in
    ``running`` that decode, and no others, hold one row each.
    """

    def __init__(
        self, config: SchedulerConfig, policy: Policy, cache: PageCache, beams: Beams, rows: Rows, *, ahead: LookAhead
    ) -> None:
        self.cache, self.beams, self.rows = cache, beams, rows
        self.groups = Groups(cache, ahead)
        self.live: dict[Key, Sequence] = {}
        self.waiting = WaitingQueue(policy.rank)
        self.running: dict[Key, Sequence] = {}
        self._needing_tokens: set[Key] = set()  # live sequences with ``needs_its_tokens``, and some that had it
        self.num_preemptions = 0
        self.num_swaps = 0  # preemptions that moved the pages to the host
        self.num_swapped = 0  # of the sequences that wait now
        self.fresh_are_held_back = False  # memory ran out: no new prompt starts until a preempted one does, or ends
        self._urgency = policy.urgency
        self._may_swap = make_preemption(config)

    @property
    def needs_its_tokens(self) -> bool:
        """Whether the host must know the tokens of a step before the next one can be computed."""
        while self._needing_tokens:
            key = next(iter(self._needing_tokens))
            if self.live[key].needs_its_tokens:
                return True
            self._needing_tokens.remove(key)
        return False

    def in_state(self, state: SequenceState) -> list[Sequence]:
        """Running sequences in ``state``, the most urgent first."""
        if len(self.rows) == len(self.running) and state is not SequenceState.DECODING:
            return []  # as in most steps
        return sorted((s for s in self.running.values() if s.state is state), key=self._urgency)

    def add(self, sequence: Sequence) -> None:
        """A new sequence joins the queue."""
        self.live[sequence.key] = sequence
        if sequence.needs_its_tokens:
            self._needing_tokens.add(sequence.key)
        self.groups.join(sequence)
        first = self.beams.join(sequence)
        self.enter_queue(sequence)
        self.waiting.unhold(first)

    def enter_queue(self, sequence: Sequence) -> None:
        if self.groups.holds(sequence) or self.beams.holds(sequence):
            self.waiting.hold(sequence)
        else:
            self.waiting.push(sequence)

    def start(self, sequence: Sequence, match: Match, draft: Draft) -> list[Sequence]:
        """Returns those that run from now on: ``sequence``, and for a swapped-out beam its whole search."""
        family = self.beams.family(sequence)
        for member in family:
            self._leave_queue(member)
            self.running[member.key] = member
        self.cache.enter(family, match)
        for member in family:
            member.state = self.beams.state_at_start(member) if member.is_beam else state_at_start(member)
            draft.starts[member.key] = Start(member.key, member.num_computed_tokens)
        self.waiting.hold(*self.groups.start(sequence))
        self.beams.start(sequence, draft.step)
        if sequence.num_preemptions:
            self.fresh_are_held_back = False
        return family

    def preempt(self, victim: Sequence, draft: Draft) -> None:
        """Take the pages of ``victim``, for a beam those of its whole search, and return it to the queue.

        Its computed tokens are swapped out, or recomputed later. Nothing is swapped for sequences that started in this
        step, as their pages are only on their way; nor for those that run alone, as they would return to a pool that
        has just been too small for them.
        """
        family = self.beams.family(victim)
        may_swap = self._may_swap(victim) and victim.key not in draft.starts and len(family) < len(self.running)
        for member in family:
            draft.drop(member.key)
            draft.preempted.append(member.key)
            self._leave(member)
        if may_swap and self.cache.swap_out(family):
            self.num_swaps += len(family)
            self.num_swapped += len(family)
            state = SequenceState.SWAPPED
        else:
            self.beams.restart(victim)
            for member in family:
                self.cache.give_up(member)
            state = SequenceState.WAITING
        for member in family:
            member.state = state
            member.num_preemptions += 1
            self.enter_queue(member)
        self.num_preemptions += len(family)
        self.fresh_are_held_back = True

    def branch(self, sequence: Sequence, found: Candidates, progress: Progress) -> None:
        """A beam has taken its step. Once all of its search have, they continue, or the search is over."""
        successors = self.beams.take(sequence, found)
        if successors is None:
            return
        for beam, _, _ in successors:
            if beam.key not in self.running:
                self._leave_queue(beam)
                self.running[beam.key] = beam
            beam.state = SequenceState.PREFILLING
        ended = self.beams.conclude(sequence)
        progress.choose(sequence.group_key or sequence.key, successors, [found.reason for _, found in ended])
        for beam, hypothesis in ended:
            progress.conclude(beam.key, hypothesis)
            self.retire(beam, hypothesis.reason)

    def retire(self, sequence: Sequence, reason: str, *, is_sound: bool = True) -> None:
        """End a sequence: its row is free at once, its pages go to limbo."""
        del self.live[sequence.key]
        self._needing_tokens.discard(sequence.key)
        if sequence.key in self.running:
            self._leave(sequence)
            self.fresh_are_held_back = False
        else:
            self._leave_queue(sequence)
            self.fresh_are_held_back &= not sequence.num_preemptions  # nothing may be left that would return first
        self.cache.retire(sequence, is_sound=is_sound)
        self.groups.leave(sequence, is_sound=is_sound)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        for member in self.beams.disband(sequence):
            self.retire(member, "abort")

    def _leave_queue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence.key)
        self.num_swapped -= sequence.state is SequenceState.SWAPPED

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.key]
        if sequence.row is not None:
            self.rows.leave(sequence)
        self.cache.states.leave(sequence)
        self.waiting.unhold(self.groups.stop(sequence))
