"""Scheduling policies by name: who goes first, and who gives way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ....protocol.config import SchedulerConfig
from .queues import Rank
from .sequence import Sequence


class Policy(Protocol):
    """The choices on which policies differ. How a choice is carried out is the scheduler's."""

    def rank(self, sequence: Sequence) -> Rank:
        """Place among the waiting, lowest first. Does not change while the sequence waits."""
        ...

    def decodes_first(self, num_prefill_skips: int) -> bool:
        """Whether decodes take from the token budget before prompts; the last so many steps passed the prompts by."""
        ...

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Whose pages are taken when there are none left."""
        ...


class Fifo:
    """Decodes never stall for a prompt; prompts go in order of arrival; the latest arrival gives way.

    Preempted sequences come before fresh ones: they have waited before, and a client already reads their tokens.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_prefill_skip = config.max_prefill_skip

    def rank(self, sequence: Sequence) -> Rank:
        return (sequence.num_preemptions == 0, sequence.arrival)

    def decodes_first(self, num_prefill_skips: int) -> bool:
        return num_prefill_skips < self._max_prefill_skip

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=lambda sequence: sequence.arrival)


_POLICIES: dict[str, type[Fifo]] = {"fifo": Fifo}


def make_policy(config: SchedulerConfig) -> Policy:
    return _POLICIES[config.policy](config)
