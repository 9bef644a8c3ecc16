"""Planning a step while the previous one runs: its sequences are advanced before their tokens are known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ....protocol.config import SchedulerConfig
from .chunks import note_chunk
from .plan import Plan
from .sequence import Key, Sequence, SequenceState
from .states import StatePool

if TYPE_CHECKING:
    from .proposals import Proposals
    from .scheduler import Scheduler


class LookAhead:
    """The step, if any, whose sequences are advanced: each sequence it samples ends with a placeholder token."""

    def __init__(self, states: StatePool) -> None:
        self._states = states
        self._plan: Plan | None = None
        self._num_in_flight: dict[Key, int] | None = None  # of that plan, once someone has asked

    @property
    def is_under_way(self) -> bool:
        """Whether there is such a step."""
        return self._plan is not None

    @property
    def carried_rows(self) -> dict[Key, int]:
        """Sequences that end with a placeholder, and the rows of their tokens in the result of the step in flight."""
        return {key: row for row, key in enumerate(self._plan.sampled)} if self._plan else {}

    @property
    def num_in_flight(self) -> dict[Key, int]:
        """Tokens of each sequence that are being computed."""
        if self._num_in_flight is None:
            self._num_in_flight = self._plan.num_tokens_of if self._plan else {}
        return self._num_in_flight

    def advance(self, plan: Plan, running: Mapping[Key, Sequence]) -> list[Sequence]:
        """Count ``plan`` as computed; returns the sequences that got a placeholder. Idempotent."""
        if self._plan is plan:
            return []
        assert self._plan is None, f"the tokens of step {self._plan and self._plan.step} are not known yet"
        self._plan, self._num_in_flight = plan, None
        sampled = []
        for key, start, num_tokens, samples, proposed in plan.chunks:
            sequence = running.get(key)
            if sequence is None:
                continue
            sequence.num_computed_tokens = start + num_tokens - len(proposed)
            if sequence.state_rows is not None:
                self._states.advance(sequence)
            if sequence.state is SequenceState.PREFILLING:
                note_chunk(sequence)
            if samples and not sequence.is_beam:
                sequence.append(0)
                sampled.append(sequence)
            elif sequence.is_complete:
                sequence.state = SequenceState.ENDING
        return sampled

    def settle(self) -> None:
        """The tokens are known."""
        self._plan = self._num_in_flight = None

    @contextmanager
    def rewound(self, plan: Plan, running: Mapping[Key, Sequence]) -> Iterator[None]:
        """Within this block the sequences of ``plan`` are as when it was launched, so that it can run again."""
        keys = plan.sampled if self._plan is plan else []
        sequences = [running[key] for key in keys if key in running and not running[key].is_beam]
        for sequence in sequences:
            sequence.num_tokens -= 1
        try:
            yield
        finally:
            for sequence in sequences:
                sequence.num_tokens += 1


def may_plan_ahead(scheduler: Scheduler, in_flight: Plan) -> bool:
    """Whether the next step can be planned without the tokens of ``in_flight``, and is unlikely to need pages of other
    sequences.

    It can run short of pages only if a starting sequence claims idle pages before the decodes; these wait for a step.
    """
    if scheduler.roster.needs_its_tokens:
        return False
    prompts = scheduler.roster.in_state(SequenceState.PREFILLING)
    if _num_due(scheduler.proposals, prompts, in_flight):
        return False
    config, running, cache = scheduler.config, scheduler.running, scheduler.cache
    num_starts = config.max_live - len(running) if scheduler.waiting else 0
    num_tokens = config.token_budget if num_starts else _most_prompt_tokens(prompts, config)
    # One more page for each decode, and for each prompt, as a chunk may begin and end inside a page.
    return cache.has(cache.pages_for(num_tokens) + len(running) + num_starts + 1)


def _num_due(proposals: Proposals, prompts: list[Sequence], in_flight: Plan) -> int:
    """The most proposals that the next step may have, depending on whether tokens of these prompts are left for it."""
    computing = in_flight.num_tokens_of if prompts else {}
    if any(prompt.num_uncomputed_tokens > computing.get(prompt.key, 0) for prompt in prompts):
        return proposals.num_due_beside_prompts
    return proposals.num_due


def _most_prompt_tokens(prompts: Iterable[Sequence], config: SchedulerConfig) -> int:
    """The most tokens of these prompts that the next step can compute."""
    return min(config.token_budget, sum(min(s.num_uncomputed_tokens, config.chunk_tokens) for s in prompts))
