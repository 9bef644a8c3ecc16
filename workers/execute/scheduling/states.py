"""Slots for the state that a model's recurrent layers keep per sequence: one fixed-size state instead of pages.

A state covers all tokens up to some position. It cannot be divided, so no prefix of it can be shared, forked or moved
to the host: a sequence that has to restart recomputes all of its tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from .sequence import Sequence


class StateSlots:
    """Slots 1..num_slots, the lowest free one first; slot 0 is the trash slot, used by padding.

    Invariant: each running sequence has a slot of its own, waiting ones have none. If the model keeps no states there
    are no slots, and no sequence gets one.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(1, num_slots + 1))  # a heap

    def enter(self, sequence: Sequence) -> None:
        """Give ``sequence`` a slot, which contains the state of an earlier sequence."""
        if self.num_slots:
            sequence.state_slot = heapq.heappop(self._free)

    def leave(self, sequence: Sequence) -> None:
        if sequence.state_slot:
            heapq.heappush(self._free, sequence.state_slot)
            sequence.state_slot = 0

    def check(self, running: Iterable[Sequence]) -> None:
        """Check that every slot is either free or of one running sequence."""
        if self.num_slots:
            slots = sorted([*self._free, *(sequence.state_slot for sequence in running)])
            assert slots == list(range(1, self.num_slots + 1)), f"slots of states are lost or shared: {slots}"
