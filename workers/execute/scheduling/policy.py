"""Scheduling policies by name: who goes first, and who gives way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple, Protocol

from ....protocol.config import SchedulerConfig
from .queues import Rank
from .sequence import Sequence


class Phase(Enum):
    """The three groups that share the budgets of a step."""

    DECODES = "decodes"
    PROMPTS = "prompts"  # that are under way
    WAITING = "waiting"


class Skips(NamedTuple):
    """How many steps in a row have passed somebody by for want of budget."""

    prefills: int = 0
    decodes: int = 0

    def after(self, *, prefills: bool, decodes: bool) -> Skips:
        """With a step more, which passed by prompts, or decodes, or neither."""
        return Skips(self.prefills + 1 if prefills else 0, self.decodes + 1 if decodes else 0)


class Policy(Protocol):
    """The choices on which policies differ. How a choice is carried out is the scheduler's."""

    margin: float  # share of the pages that a new prompt must leave free while others run

    def urgency(self, sequence: Sequence) -> int:
        """Place among its like, lowest first. Never changes."""
        ...

    def rank(self, sequence: Sequence) -> Rank:
        """Place among the waiting, lowest first. Does not change while the sequence waits."""
        ...

    def phases(self, fill: float, skips: Skips) -> tuple[Phase, ...]:
        """Who takes from the budgets first, and who next. ``fill`` is the share of the rows that could decode."""
        ...

    def decodes_join(self, fill: float, skips: Skips) -> bool:
        """Whether decodes run in a step that computes prompts."""
        ...

    def stand_up(self, seated: list[Sequence], num_rows: int) -> list[Sequence]:
        """Who of ``seated`` gives up a row when so many are missing. ``seated`` starts with who sits longest."""
        ...

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Whose pages are taken when there are none left."""
        ...


class Fifo:
    """Decodes never stall for a prompt; prompts go in order of arrival; the latest arrival gives way.

    Preempted sequences come before fresh ones: they have waited before, and a client already reads their tokens.
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

    def stand_up(self, seated: list[Sequence], num_rows: int) -> list[Sequence]:
        return []

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=lambda sequence: (self.urgency(sequence), sequence.arrival))


class PrefillFirst(Fifo):
    """Prompts that have begun are finished before anybody decodes: the first token is sooner, the next ones later."""

    default_margin = 0.0

    def phases(self, fill: float, skips: Skips) -> tuple[Phase, ...]:
        if skips.decodes >= self._max_decode_skip:
            return Phase.DECODES, Phase.PROMPTS, Phase.WAITING
        if skips.prefills >= self._max_prefill_skip:
            return Phase.PROMPTS, Phase.WAITING, Phase.DECODES
        return Phase.PROMPTS, Phase.DECODES, Phase.WAITING


class RoundRobin(Fifo):
    """Where more sequences could decode than there are rows, those served longest ago sit down next."""

    def stand_up(self, seated: list[Sequence], num_rows: int) -> list[Sequence]:
        return sorted(seated, key=lambda sequence: -sequence.last_step)[:num_rows]


class Priority(Fifo):
    """The lowest ``Sequence.priority`` goes first, as in vLLM, and the highest gives way.

    With age a request gains on those that arrive later: so many later arrivals outweigh one level. Nobody starves, and
    since the order of two requests never changes, no queue is ever sorted anew.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._ageing = config.arrivals_per_level

    def urgency(self, sequence: Sequence) -> int:
        return sequence.arrival + self._ageing * sequence.priority


class JoinWhenFull:
    """Another policy, in which prompts go first and decodes share a step with them only when the rows are nearly full.

    Source: oDriver's planner, which joins above 0.95. The guard on skipped decodes is ours.
    """

    def __init__(self, policy: Policy, config: SchedulerConfig) -> None:
        self.margin = policy.margin
        self.urgency, self.rank = policy.urgency, policy.rank
        self.stand_up, self.victim = policy.stand_up, policy.victim
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
    """Swapped is what would take more than one chunk to compute again; the copy costs little next to that.

    So are samples of one request, which would be computed again as many times as there are, as in cacheflow; and beams,
    whose search would start again from the prompt.
    """
    return lambda s: (
        s.num_computed_tokens > config.prefill_chunk or s.is_beam or (s.group is not None and len(s.group.members) > 1)
    )


_PREEMPTIONS: dict[str, Callable[[SchedulerConfig], Callable[[Sequence], bool]]] = {
    "auto": _long_ones_and_groups,
    "recompute": lambda config: lambda sequence: False,
    "swap": lambda config: lambda sequence: True,
}


def make_preemption(config: SchedulerConfig) -> Callable[[Sequence], bool]:
    """Whether a preempted sequence is better moved to host pages, where there are any, than computed again."""
    return _PREEMPTIONS[config.preemption](config)


def make_policy(config: SchedulerConfig) -> Policy:
    policy = _POLICIES[config.policy](config)
    return JoinWhenFull(policy, config) if config.decode_join_fill else policy
