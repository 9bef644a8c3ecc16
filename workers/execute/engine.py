"""A scheduler combined with a runner: sequences in, tokens out, one step at a time.

``step`` is ``plan``, ``launch`` and ``collect``. Callers that record a step before it runs, or do something else while
the device computes, call these three instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...protocol.arrays import Float32
from .isolation import Computed, IsolatingRunner
from .scheduling.ahead import may_plan_ahead
from .scheduling.audit import Stats, check, take_stats
from .scheduling.history import StepHistory, StepRecord
from .scheduling.plan import Plan
from .scheduling.pooling import pool
from .scheduling.progress import Progress
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Key, Sequence
from .step import PromptScores, Runner, TokenLogprobs

_NO_DIRECTION = "the hidden states of the prompt are zero or not finite"


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What one step did, and its results."""

    plan: Plan
    progress: Progress  # the tokens, and the sequences that ended
    logprobs: dict[Key, TokenLogprobs]  # where requested
    scores: dict[Key, PromptScores]  # of prompt tokens, where requested
    embeddings: dict[Key, Float32]  # [embedding_size], where requested and complete
    planned_at: int  # by the engine's clock, as are the following
    launched_at: int
    began_at: int  # when it was launched or the previous step was collected, whichever is later
    collected_at: int


class Trace:
    """Receives every call to an engine, and its steps, in order. This one ignores them."""

    def add(self, sequence: Sequence) -> None:
        """See ``Engine.add``."""

    def release(self, key: Key) -> None:
        """See ``Engine.release``."""

    def plan(self, plan: Plan | None, planned_at: int) -> None:
        """``plan`` is in flight from now on; None if nothing could be planned."""

    def write(self, outputs: StepOutputs) -> None:
        """A step is complete."""


class _InFlight(NamedTuple):
    plan: Plan
    planned_at: int
    launched_at: int


class Engine:
    """Runs sequences to their end. At most ``depth + 1`` steps are in flight.

    At depth 1 a step is planned and launched before the tokens of the previous one are known; the device passes them
    on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        clock: Callable[[], int] = lambda: 0,
        depth: int = 0,
        trace: Trace | None = None,
    ) -> None:
        assert depth in (0, 1), f"depth is {depth}: a step can only use the tokens of the step before it"
        self.scheduler = scheduler
        self._trace = trace or Trace()
        self._runner = IsolatingRunner(runner, scheduler)
        self._clock = clock
        self._depth = depth
        self._in_flight: deque[_InFlight] = deque()
        self._planned_at = 0
        self._collected_at = 0
        self.history = StepHistory()

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.live or self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """Steps launched but not yet collected."""
        return len(self._in_flight)

    @property
    def latest_plan(self) -> Plan | None:
        """The plan of the latest launched step, unless that is collected already."""
        return self._in_flight[-1].plan if self._in_flight else None

    @property
    def stats(self) -> Stats:
        return take_stats(self.scheduler)

    def add(self, sequence: Sequence) -> None:
        """See ``Scheduler.add``."""
        self._trace.add(sequence)
        self.scheduler.add(sequence)

    def release(self, key: Key) -> None:
        """Abort a sequence, or free the pages of a finished one; see ``Scheduler.release``."""
        self._trace.release(key)
        self.scheduler.release(key)

    def step(self) -> StepOutputs | None:
        """Complete one step, launching others behind it where possible; None if there is nothing to do."""
        while self.may_plan:
            plan = self.plan()
            if plan is None:
                break
            self.launch(plan)
        return self.collect() if self._in_flight else None

    @property
    def may_plan(self) -> bool:
        """Whether the next step can be planned now: no step is in flight, or none that it must wait for."""
        if (latest := self.latest_plan) is None:
            return True
        must_wait = len(self._in_flight) > self._depth or latest.has_proposals
        return not must_wait and self._runner.may_go_on and may_plan_ahead(self.scheduler, latest)

    def plan(self) -> Plan | None:
        """The next step, or None. A planned step must be launched and collected, even if it has no chunks."""
        assert len(self._in_flight) <= self._depth, "a step is in flight"
        if self._in_flight:
            self.scheduler.advance(self._in_flight[-1].plan)
        self._planned_at = self._clock()
        self.scheduler.expire(self._planned_at)
        plan = self.scheduler.plan()
        self._trace.plan(plan, self._planned_at)
        return plan

    def launch(self, plan: Plan) -> None:
        """Pass the step to the runner, which may still be computing when this returns."""
        self._in_flight.append(_InFlight(plan, self._planned_at, self._clock()))
        self._runner.launch(plan)

    def collect(self) -> StepOutputs:
        """The outputs of the oldest step in flight; waits for the runner."""
        assert self._in_flight, "no step is in flight"
        plan, planned_at, launched_at = self._in_flight.popleft()
        computed = self._runner.collect()
        began_at, collected_at = max(launched_at, self._collected_at), self._clock()
        # Nothing may be written any more for a sequence that ended after the launch.
        running = self.scheduler.running
        scores = {key: found for key, found in computed.scores.items() if key in running}
        embeddings, unsound = _embeddings(computed, running)
        failed = {**computed.failed, **unsound}
        progress = self.scheduler.apply(plan, computed.token_ids, failed, computed.candidates)
        self.scheduler.observe(plan, collected_at - max(planned_at, self._collected_at))
        self._collected_at = collected_at
        self.history.append(StepRecord.of(plan, began_at=began_at, collected_at=collected_at))
        times = planned_at, launched_at, began_at, collected_at
        outputs = StepOutputs(plan, progress, computed.logprobs, scores, embeddings, *times)
        self._trace.write(outputs)
        return outputs

    def check(self) -> None:
        """Verify that no page and no sequence is lost; see ``audit.check``."""
        check(self.scheduler)


def _embeddings(computed: Computed, running: Mapping[Key, Sequence]) -> tuple[dict[Key, Float32], dict[Key, str]]:
    """The embeddings that are complete with this step, and why there are none for some sequences."""
    embeddings: dict[Key, Float32] = {}
    unsound: dict[Key, str] = {}
    for key, found in computed.states.items():
        if key not in running or (embedding := pool(running[key], found.start, found.values)) is None:
            continue
        if np.isfinite(embedding).all():
            embeddings[key] = embedding
        else:
            unsound[key] = _NO_DIRECTION
    return embeddings, unsound
