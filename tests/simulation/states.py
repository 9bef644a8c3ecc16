"""A model with recurrent layers: besides its pages, a sequence has a state, in a row that the scheduler chooses."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from tests.simulation.plan import Plan
from triptych.protocol.arrays import Int64
from triptych.workers.execute.scheduling.states import num_state_rows
from triptych.workers.execute.step import StepInputs


def keep_states(plan: Plan, dice: random.Random) -> None:
    """Without host pages, as states cannot be swapped."""
    plan.card = replace(plan.card, num_snapshots=dice.choice((0, 1, 3)))
    plan.config = replace(plan.config, cache=replace(plan.config.cache, host_pages=0))


class States:
    """A state is the hash of all tokens it has seen, as ``hash_lm`` computes it from the pages."""

    def __init__(self, max_live: int, num_snapshots: int) -> None:
        self.rows: Int64 = np.full(num_state_rows(max_live, num_snapshots) + 1, -1, np.int64)

    def compute(self, inputs: StepInputs) -> list[int]:
        """The state of each sequence after this step."""
        cut, adapters = inputs.cut, inputs.token_adapters
        assert cut is not None, "every sequence has rows"
        tokens = inputs.token_ids.astype(np.int64) + (0 if adapters is None else adapters)
        ends = np.cumsum(cut.lengths)
        sums = np.add.reduceat((inputs.positions + 1) * tokens, ends - cut.lengths)
        for read, write, start, total in zip(cut.reads, cut.writes, cut.starts, sums, strict=True):
            self.rows[write] = total + (self.rows[read] if start else 0)
        last = np.searchsorted(ends, inputs.query_starts[1:])  # each sequence's last segment
        states: list[int] = self.rows[cut.writes[last]].tolist()
        return states
