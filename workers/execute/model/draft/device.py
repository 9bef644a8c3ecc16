"""The runner of a draft model on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...sampling.kinds import SamplingKind
from ...step import StepInputs
from ..device.graphs import GraphKey
from ..device.runner import DeviceRunner


class DraftRunner(DeviceRunner):
    """Its steps are decodes, which take their tokens from the step before, or chunks of any lengths, never both.

    Chunks of a few tokens, those that came since the last guess, have the graphs that other models have for steps with
    proposals. All guesses come from graphs, unless the host changes their logits.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self._graphs is not None:
            self._router.takes_short_chunks = True

    def _rarer_steps(self) -> Iterator[StepInputs]:
        """Nobody asks a draft model for logprobs, which take the most memory."""
        for inputs in super()._rarer_steps():
            if not inputs.scored and all(sequence.params.logprobs is None for sequence in inputs.sampled):
                yield inputs

    def _first_keys(self) -> list[GraphKey]:
        drawn = self._keys(self._router.buckets[:-1], (SamplingKind.DRAWN, SamplingKind.CUT))
        return [*super()._first_keys(), *drawn]

    def _mixed_keys(self) -> list[GraphKey]:
        return [key for key in super()._mixed_keys() if not key.size.num_rows]

    def _measure_checks(self) -> None:
        """It checks nothing."""
