"""A step in which one sequence's failure is not everybody's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from .scheduling.beam_search import Candidates
from .scheduling.plan import Plan
from .scheduling.sequence import Key
from .step import Runner, StepInputs, StepResult, TokenLogprobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a step by sequence: one that gets no token in this step can fail as well."""

    token_ids: list[int] = field(default_factory=list)  # one for each of Plan.sampled; void for the failed
    logprobs: dict[Key, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[Key, Candidates] = field(default_factory=dict)  # of the beams
    failed: dict[Key, str] = field(default_factory=dict)


class IsolatingRunner:
    """Runs plans. When a step raises, its halves are run, and theirs: who raises alone is to blame.

    One bad sequence of n costs about 2 log2(n) more runs. After an error that is fatal to the device (a sticky one of
    CUDA) every sequence would raise: it is not caught, the process ends, and the next one looks for the culprit.

    Running again is harmless: what the failed attempt wrote is written once more, the same values to the same places.
    """

    def __init__(
        self,
        runner: Runner,
        build_inputs: Callable[[Plan], StepInputs],
        is_fatal: Callable[[Exception], bool] = lambda error: False,
    ) -> None:
        self._runner = runner
        self._is_fatal = is_fatal
        self._build_inputs = build_inputs
        self._plan: Plan | None = None
        self._launch_error: Exception | None = None

    def launch(self, plan: Plan) -> None:
        assert self._plan is None, "a step is in flight"
        self._plan = plan
        self._launch_error = None
        if plan.moves:
            # Not isolated: a page that was not moved is nobody's own, and cannot be moved a second time. Whoever holds
            # the runner ends, and starts again with empty pages.
            self._runner.move(plan.moves)
        if not plan.chunks:
            return
        try:
            self._runner.launch(self._build_inputs(plan))
        except Exception as error:
            self._launch_error = error

    def collect(self) -> Computed:
        """The result of the launched plan; waits for the runner."""
        plan, self._plan = self._plan, None
        assert plan is not None, "no step is in flight"
        if not plan.chunks:
            return Computed()
        try:
            if self._launch_error is not None:
                raise self._launch_error
            return _by_key(plan, self._runner.collect())
        except Exception as error:
            if self._is_fatal(error):
                raise
            return self._divide(plan, error)

    def _divide(self, plan: Plan, error: Exception) -> Computed:
        if len(plan.chunks) == 1:
            chunk = plan.chunks[0]
            return Computed([0] * chunk.samples, failed={chunk.key: f"{type(error).__name__}: {error}"})
        logger.warning("step %d failed with %d sequences, now each half", plan.step, len(plan.chunks), exc_info=error)
        whole = Computed()
        for half in plan.halves():
            self.launch(half)
            part = self.collect()
            whole.token_ids.extend(part.token_ids)
            whole.logprobs.update(part.logprobs)
            whole.candidates.update(part.candidates)
            whole.failed.update(part.failed)
        return whole


def _by_key(plan: Plan, result: StepResult) -> Computed:
    if not (result.logprobs or result.candidates or result.failed):
        return Computed(result.token_ids.tolist())
    sampled = plan.sampled
    return Computed(
        result.token_ids.tolist(),
        logprobs={sampled[row]: logprobs for row, logprobs in result.logprobs.items()},
        candidates={sampled[row]: found for row, found in result.candidates.items()},
        failed={sampled[row]: why for row, why in result.failed.items()},
    )
