"""Places for what a model's recurrent layers remember of each sequence: one state, of a fixed size, and no pages.

A state is that of all tokens up to one. It cannot be cut, so nobody shares a prefix of it, forks from it or takes it
to the host: a sequence that has to begin again computes all of its tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from .sequence import Sequence


class StateSlots:
    """Slots 1..num_slots, the lowest free one first; slot 0 is the trash slot, which padding uses.

    Invariant: a running sequence has a slot that nobody else has, a waiting one has none. There are none, and nobody
    gets one, where the model keeps no states.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(1, num_slots + 1))  # a heap

    def enter(self, sequence: Sequence) -> None:
        """Gives ``sequence`` a slot. What is in it is of somebody who is gone."""
        if self.num_slots:
            sequence.state_slot = heapq.heappop(self._free)

    def leave(self, sequence: Sequence) -> None:
        if sequence.state_slot:
            heapq.heappush(self._free, sequence.state_slot)
            sequence.state_slot = 0

    def check(self, running: Iterable[Sequence]) -> None:
        """Proves that every slot is free or of one running sequence."""
        if self.num_slots:
            slots = sorted([*self._free, *(sequence.state_slot for sequence in running)])
            assert slots == list(range(1, self.num_slots + 1)), f"slots of states are lost or shared: {slots}"
