"""The hash model as a recurrent one: its tokens depend on the state in a row, and on no page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from triptych.protocol.arrays import Int32
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.model.states import SequenceStates, StateKey, StateLayout, StateShape
from triptych.workers.execute.step import StepInputs, resolve

NUM_ROWS = 256
LAYOUT = StateLayout({StateKey(0, "recurrent", 0): StateShape((1,), torch.int64)}, frozenset())


class RecurrentHashRunner(HashRunner):
    """Gives the tokens of ``HashRunner``. A state of another sequence, or with too few or too many tokens, shows."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._states = SequenceStates(LAYOUT, NUM_ROWS, torch.device("cpu"))
        self._sums = np.empty(0, np.int64)  # [T], of the step, each hash including all earlier tokens
        self._inputs: StepInputs | None = None

    def launch(self, inputs: StepInputs) -> None:
        resolved = resolve(inputs, self._last_tokens)
        assert resolved.cut is not None, "every sequence has rows"
        self._states.begin_step(resolved.cut)
        adapters = 0 if resolved.token_adapters is None else resolved.token_adapters
        hidden = torch.from_numpy((resolved.positions + np.int64(1)) * (resolved.token_ids + adapters))
        self._sums = self._states.mix(0, _add_up, hidden[None, :, None])[0, :, 0].numpy()
        self._inputs = resolved
        owners = np.arange(len(resolved.context_lens), dtype=np.int32)[:, None]
        super().launch(replace(inputs, block_tables=owners))

    def _read(self, block_table: Int32, num_tokens: int) -> int:
        """The hash of a sequence of this step, whose number stands for its block table."""
        assert self._inputs is not None, "a step was launched"
        first = int(self._inputs.query_starts[int(block_table[0])])
        return int(self._sums[first + num_tokens - 1 - int(self._inputs.positions[first])])


def _add_up(hidden: torch.Tensor, cache: Any) -> torch.Tensor:
    """[S, L, 1], each including those before it, and the state [S, 1] of all before these."""
    sums: torch.Tensor = cache.get_recurrent_state(0)[:, None] + hidden.cumsum(dim=1)
    cache.update_recurrent_state(sums[:, -1], 0)
    return sums
