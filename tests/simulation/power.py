"""The power fails while the journal is on a disk: what was not flushed is lost, or not, sector by sector."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.plan import FAULTS_END_NS, Plan
from triptych.protocol.journal.layout import Journal

SECTOR = 512  # bytes, which a disk writes completely or not at all; a record is one
CHANCE = 0.5  # probability that the kernel had not written a sector


def let_power_fail(plan: Plan, dice: random.Random) -> None:
    service = replace(plan.config.service, journal="journal", journal_flush=dice.choice(("accept", "accept", "step")))
    plan.config = replace(plan.config, service=service)
    for request in plan.requests:
        if "best_of" in request.wire:  # one of its answers might not be computed again, and others be the best then
            request.wire.pop("deadline_ms", None)
            request.wire.pop("max_queue_ms", None)
    for _ in range(dice.randrange(1, 3)):
        plan.actions.append((dice.randrange(FAULTS_END_NS), lambda world: world.end_driver(power_fails=True)))


class Disk:
    """What is sure to be on the disk: the journal as it was when it was flushed last."""

    def __init__(self, journal: Journal, dice: random.Random) -> None:
        self._memory, self._dice = journal._map, dice
        self.num_failures = 0
        self.flush()

    def flush(self) -> None:
        self._flushed = bytes(self._memory)

    def fail(self) -> None:
        """The journal is what the next boot finds."""
        self.num_failures += 1
        for at in range(0, len(self._flushed), SECTOR):
            before = self._flushed[at : at + SECTOR]
            if before != self._memory[at : at + SECTOR] and self._dice.random() < CHANCE:
                self._memory[at : at + SECTOR] = before
        self.flush()
