"""Mutations that need a step in flight; see ``mutations.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.simulation.mutations import Patch, by_name
from triptych.workers.execute import engine
from triptych.workers.execute.bookkeeping import Bookkeeper
from triptych.workers.execute.quarantine import Quarantine
from triptych.workers.execute.scheduling.ahead import LookAhead
from triptych.workers.execute.scheduling.limbo import Limbo
from triptych.workers.execute.scheduling.plan import Plan
from triptych.workers.execute.scheduling.progress import Progress
from triptych.workers.execute.scheduling.scheduler import Scheduler
from triptych.workers.execute.scheduling.sequence import Key, Sequence
from triptych.workers.execute.step_intent import StepIntent


def pages_are_handed_out_under_a_step_in_flight(patch: Patch) -> None:
    """Pages of an ended sequence are given to the next one while a launched step still writes to them."""
    patch.setattr(Limbo, "_is_over", lambda self, entry: True)


def tokens_after_a_stop_token_are_sent(patch: Patch) -> None:
    """A sequence whose stop token became known after its next step was launched gets that step's token, too."""
    real_add, real_apply = Scheduler.add, Scheduler.apply
    sequences: dict[Key, Sequence] = {}

    def add(self: Scheduler, sequence: Sequence) -> None:
        sequences[sequence.key] = sequence
        real_add(self, sequence)

    def apply(self: Scheduler, plan: Plan, token_ids: list[int], *rest: Any) -> Progress:
        progress = real_apply(self, plan, token_ids, *rest)
        ends = {chunk.key: chunk.start + chunk.num_tokens for chunk in plan.chunks}
        for key, token_id in zip(plan.sampled, token_ids, strict=True):
            if key not in progress.keys and sequences[key].finish_reason == "stop":
                progress.emit(key, ends[key] - sequences[key].num_prompt_tokens, token_id)
        return progress

    patch.setattr(Scheduler, "add", add)
    patch.setattr(Scheduler, "apply", apply)


def tokens_are_assigned_to_the_sequences_that_still_run(patch: Patch) -> None:
    """The tokens of a step are assigned in order to its sequences without those that ended since its launch."""
    real = Scheduler.apply

    def apply(self: Scheduler, plan: Plan, token_ids: list[int], *rest: Any) -> Progress:
        tokens = iter(token_ids)
        return real(self, plan, [next(tokens) if key in self.running else 0 for key in plan.sampled], *rest)

    patch.setattr(Scheduler, "apply", apply)


def carried_tokens_are_assigned_to_the_sequences_that_still_run(patch: Patch) -> None:
    """The same on the device, where the next step carries the tokens over."""
    real = LookAhead.advance
    running: Mapping[Key, Sequence] = {}

    def advance(self: LookAhead, plan: Plan, sequences: Mapping[Key, Sequence]) -> list[Sequence]:
        nonlocal running
        running = sequences
        return real(self, plan, sequences)

    def carried_rows(self: LookAhead) -> dict[Key, int]:
        sampled = self._plan.sampled if self._plan else []
        return {key: row for row, key in enumerate(key for key in sampled if key in running)}

    patch.setattr(LookAhead, "advance", advance)
    patch.setattr(LookAhead, "carried_rows", property(carried_rows))


def steps_are_planned_ahead_whatever_they_need(patch: Patch) -> None:
    """Even a step that preempts a sequence whose last token is not known yet."""
    patch.setattr(engine, "may_plan_ahead", lambda *_: True)
    patch.setattr(LookAhead, "is_under_way", property(lambda self: False))


def intent_ends_with_the_first_of_two_steps(patch: Patch) -> None:
    """When a step is collected, the intent is cleared although another step is in flight."""

    def end(self: StepIntent) -> None:
        self._in_flight.popleft()
        self._intent.end()

    patch.setattr(StepIntent, "end", end)


def suspects_are_cleared_after_one_token(patch: Patch) -> None:
    """It may be the token of the step before the crashing one, which had not reached the host."""
    real = Quarantine.__init__
    patch.setattr(Quarantine, "__init__", lambda self, journal, *, num_steps: real(self, journal, num_steps=1))


def restarted_execute_counts_the_token_in_flight(patch: Patch) -> None:
    """After a crash a sequence continues after the token that was being computed: it is lost."""
    real = Bookkeeper.adopt

    def adopt(self: Bookkeeper, view: Any) -> Sequence:
        sequence = real(self, view)
        if sequence.num_output_tokens and sequence.num_tokens + 1 < len(sequence.tokens):
            sequence.append(0)
        return sequence

    patch.setattr(Bookkeeper, "adopt", adopt)


OVERLAP_MUTATIONS = by_name(
    pages_are_handed_out_under_a_step_in_flight,
    tokens_after_a_stop_token_are_sent,
    tokens_are_assigned_to_the_sequences_that_still_run,
    carried_tokens_are_assigned_to_the_sequences_that_still_run,
    steps_are_planned_ahead_whatever_they_need,
    intent_ends_with_the_first_of_two_steps,
    suspects_are_cleared_after_one_token,
    restarted_execute_counts_the_token_in_flight,
)
