"""Scheduling policies by name: which sequences go first, and which are preempted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple, Protocol

from ....protocol.config import SchedulerConfig
from .queues import Rank
from .sequence import Sequence


class Phase(Enum):
    """The three groups of sequences that share the budgets of a step."""

    DECODES = "decodes"
    PROMPTS = "prompts"  # under way
    WAITING = "waiting"


class Skips(NamedTuple):
    """How many consecutive steps have skipped prompts or decodes for lack of budget."""

    prefills: int = 0
    decodes: int = 0

    def after(self, *, prefills: bool, decodes: bool) -> Skips:
        """The counts after one more step, which skipped prompts, or decodes, or neither."""
        return Skips(self.prefills + 1 if prefills else 0, self.decodes + 1 if decodes else 0)


class Policy(Protocol):
    """The decisions in which policies differ. The scheduler carries them out."""

    margin: float  # share of the pages that a new prompt must leave free while others run

    def urgency(self, sequence: Sequence) -> int:
        """Sort key among sequences in the same state, lowest first. Never changes."""
        ...

    def rank(self, sequence: Sequence) -> Rank:
        """Sort key in the queue, lowest first. Does not change while the sequence waits."""
        ...

    def phases(self, fill: float, skips: Skips) -> tuple[Phase, ...]:
        """In which order the groups draw on the budgets. ``fill`` is the share of rows that could decode."""
        ...

    def decodes_join(self, fill: float, skips: Skips) -> bool:
        """Whether decodes run in a step that computes prompts."""
        ...

    def yield_rows(self, seated: list[Sequence], num_rows: int) -> list[Sequence]:
        """Which of ``seated`` give up their rows when this many are missing. The longest-seated come first."""
        ...

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Which sequence to preempt when no pages are left."""
        ...


class Fifo:
    """Decodes never stall for a prompt; prompts go in order of arrival; the latest arrival is preempted first.

    Preempted sequences go before new ones: they have already waited, and a client is reading their tokens.
    """

    default_margin = 0.2

    def __init__(self, config: SchedulerConfig) -> None:
        self.margin = self.default_margin if config.safety_margin is None else config.safety_margin
        self._max_prefill_skip = config.max_prefill_skip
        self._max_decode_skip = config.max_decode_skip

    def urgency(self, sequence: Sequence) -> int:
        return sequence.arrival

    def rank(self, sequence: Sequence) -> Rank:
        return (sequence.num_preemptions == 0, self.urgency(sequence), sequence.arrival)

    def phases(self, fill: float, skips: Skips) -> tuple[Phase, ...]:
        if skips.prefills < self._max_prefill_skip:
            return Phase.DECODES, Phase.PROMPTS, Phase.WAITING
        return Phase.PROMPTS, Phase.WAITING, Phase.DECODES

    def decodes_join(self, fill: float, skips: Skips) -> bool:
        return True

    def yield_rows(self, seated: list[Sequence], num_rows: int) -> list[Sequence]:
        return []

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=lambda sequence: (self.urgency(sequence), sequence.arrival))


class PrefillFirst(Fifo):
    """Prompts under way are finished before any decode: the first token comes earlier, the following ones later."""

    default_margin = 0.0

    def phases(self, fill: float, skips: Skips) -> tuple[Phase, ...]:
        if skips.decodes >= self._max_decode_skip:
            return Phase.DECODES, Phase.PROMPTS, Phase.WAITING
        if skips.prefills >= self._max_prefill_skip:
            return Phase.PROMPTS, Phase.WAITING, Phase.DECODES
        return Phase.PROMPTS, Phase.DECODES, Phase.WAITING


class RoundRobin(Fifo):
    """If more sequences could decode than there are rows, those served longest ago get the next rows."""

    def yield_rows(self, seated: list[Sequence], num_rows: int) -> list[Sequence]:
        return sorted(seated, key=lambda sequence: -sequence.last_step)[:num_rows]


class Priority(Fifo):
    """The lowest ``Sequence.priority`` goes first, as in vLLM, and the highest is preempted first.

    A request gains on later arrivals with age: a fixed number of later arrivals outweighs one level. Nothing starves,
    and since the order of two requests never changes, no queue is ever re-sorted.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._ageing = config.arrivals_per_level

    def urgency(self, sequence: Sequence) -> int:
        return sequence.arrival + self._ageing * sequence.priority


class JoinWhenFull:
    """Wraps a policy: prompts go first, and decodes join a step with prompts only when the rows are nearly full.

    Source: oDriver's planner, which joins above 0.95. The limit on skipped decodes is our addition.
    """

    def __init__(self, policy: Policy, config: SchedulerConfig) -> None:
        self.margin = policy.margin
        self.urgency, self.rank = policy.urgency, policy.rank
        self.yield_rows, self.victim = policy.yield_rows, policy.victim
        self._phases = policy.phases
        self._fill = config.decode_join_fill
        self._max_decode_skip = config.max_decode_skip

    def phases(self, fill: float, skips: Skips) -> tuple[Phase, ...]:
        if self.decodes_join(fill, skips):
            return self._phases(fill, skips)
        return Phase.PROMPTS, Phase.WAITING, Phase.DECODES

    def decodes_join(self, fill: float, skips: Skips) -> bool:
        return fill > self._fill or skips.decodes >= self._max_decode_skip


_POLICIES: dict[str, type[Fifo]] = {
    "fifo": Fifo,
    "prefill_first": PrefillFirst,
    "round_robin": RoundRobin,
    "priority": Priority,
}


def _long_ones_and_groups(config: SchedulerConfig) -> Callable[[Sequence], bool]:
    """Swap what would take more than one chunk to recompute; the copy costs little by comparison.

    Also swap samples of one request, each of which would be recomputed, as in cacheflow; and beams, whose search would
    restart from the prompt.
    """
    return lambda s: (
        s.num_computed_tokens > config.chunk_tokens or s.is_beam or (s.group is not None and len(s.group.members) > 1)
    )


_PREEMPTIONS: dict[str, Callable[[SchedulerConfig], Callable[[Sequence], bool]]] = {
    "auto": _long_ones_and_groups,
    "recompute": lambda config: lambda sequence: False,
    "swap": lambda config: lambda sequence: True,
}


def make_preemption(config: SchedulerConfig) -> Callable[[Sequence], bool]:
    """Whether to swap out a preempted sequence, if there are host pages, rather than recompute it."""
    return _PREEMPTIONS[config.preemption](config)


def make_policy(config: SchedulerConfig) -> Policy:
    policy = _POLICIES[config.policy](config)
    return JoinWhenFull(policy, config) if config.decode_join_fill else policy
