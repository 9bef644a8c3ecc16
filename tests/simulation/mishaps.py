"""Steps that raise, and what they leave behind.

A failed step leaves garbage wherever it would have written: in pages, in states, and where the device keeps its tokens
for the next step. In some runs, steps also raise by chance, and pass when they are run again.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from tests.simulation.plan import Plan
from tests.simulation.requests import EXECUTE_KILLER
from triptych.protocol.arrays import Int32, Int64
from triptych.workers.execute.scheduling.sequence import Key
from triptych.workers.execute.step import StepInputs

CHANCE = 0.15  # probability that a step raises, in a run with mishaps
ALONE_CHANCE = 0.1  # of these steps, of one with a single sequence, which fails
GARBAGE = -1  # where a token or a state should be
KEPT_CHANCE = 0.5  # probability that the device still has the tokens of the step before the failed one


def allow_mishaps(plan: Plan, _: random.Random) -> None:
    plan.mishap_chance = CHANCE


class Mishaps:
    """``failing`` is called with a sequence whose step raises while it runs alone, which ends its request."""

    def __init__(self, chance: float, dice: random.Random, *, failing: Callable[[Key], None]) -> None:
        self._chance, self._dice, self._failing = chance, dice, failing

    def strike(self, inputs: StepInputs) -> bool:
        """Whether the step raises. One that computes a single sequence does so only if that sequence is known."""
        if not self._chance or self._dice.random() >= self._chance:
            return False
        sequences = [*inputs.sampled, *(span.sequence for span in inputs.embedded)]
        if len(inputs.context_lens) > 1 or len(sequences) > 1:
            return True  # it is run again: in halves, or without its proposals
        is_killer = bool(sequences) and sequences[0].tokens[0] == EXECUTE_KILLER  # might be sent again once it failed
        if not sequences or is_killer or self._dice.random() >= ALONE_CHANCE:
            return False
        self._failing(sequences[0].key)
        return True

    def spoil_row(self, inputs: StepInputs, row: int, cells: Int64) -> None:
        """This row of logits has failed because of what was written: not before a row that has not failed."""
        at = inputs.sample_rows[row]
        owner = np.searchsorted(inputs.query_starts, at, side="right") - 1
        first, end = inputs.query_starts[owner : owner + 2]
        is_first = row == 0 or inputs.sample_rows[row - 1] < first
        cells.reshape(-1)[inputs.slot_mapping[first if is_first else at : end]] = GARBAGE

    def spoil(self, inputs: StepInputs, cells: Int64, states: Int64 | None) -> None:
        """The step has failed after it wrote something else than it should have."""
        cells.reshape(-1)[inputs.slot_mapping] = GARBAGE
        if states is not None and inputs.cut is not None:
            states[inputs.cut.writes] = GARBAGE

    def keeps_tokens(self) -> bool:
        return self._dice.random() < KEPT_CHANCE


def spoiled_tokens(inputs: StepInputs) -> Int32:
    """What the device has in place of the tokens of a failed step."""
    tokens: Int32 = inputs.sample_rows * 0 + 1
    return tokens
