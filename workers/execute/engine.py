"""A scheduler and a runner put together: sequences in, tokens out, one step at a time.

``step`` is ``plan``, ``launch`` and ``collect``. Who wants to write down what a step will run before it runs, or to do
something else while the device computes, calls the three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .batch import build_inputs
from .isolation import IsolatingRunner
from .scheduling.audit import Stats, check, take_stats
from .scheduling.history import StepHistory, StepRecord
from .scheduling.plan import Plan
from .scheduling.progress import Progress
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Key, Sequence
from .step import Runner, StepInputs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What one step did and brought."""

    plan: Plan
    progress: Progress  # the tokens, who finished, who failed
    logprobs: dict[Key, TokenLogprobs]  # of those who asked
    stats: Stats  # after the step
    planned_at: int  # by the engine's clock, as all that follow
    launched_at: int
    collected_at: int


class Trace(Protocol):
    """Hears of everything that an engine is told, and of its steps, in order."""

    def add(self, sequence: Sequence) -> None: ...

    def release(self, key: Key) -> None: ...

    def plan(self, plan: Plan | None, planned_at: int) -> None:
        """This is in flight now, unless nothing could be planned."""

    def write(self, outputs: StepOutputs) -> None: ...


class NoTrace:
    """Hears and forgets."""

    def add(self, sequence: Sequence) -> None:
        pass

    def release(self, key: Key) -> None:
        pass

    def plan(self, plan: Plan | None, planned_at: int) -> None:
        pass

    def write(self, outputs: StepOutputs) -> None:
        pass


_NO_TRACE = NoTrace()


class Engine:
    """Runs sequences to their end. At most one step is in flight."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, *, clock: Callable[[], int] = lambda: 0, trace: Trace = _NO_TRACE
    ) -> None:
        self.scheduler = scheduler
        self._trace = trace
        self._runner = IsolatingRunner(runner, self._build_inputs, runner.is_fatal)
        self._clock = clock
        self._in_flight: tuple[Plan, int] | None = None  # with when it was launched
        self._planned_at = 0
        self.history = StepHistory()

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.live)

    @property
    def stats(self) -> Stats:
        return take_stats(self.scheduler)

    def add(self, sequence: Sequence) -> None:
        """See ``Scheduler.add``."""
        self._trace.add(sequence)
        self.scheduler.add(sequence)

    def release(self, key: Key) -> None:
        """Aborts a sequence, or lets the pages of a finished one go; see ``Scheduler.release``."""
        self._trace.release(key)
        self.scheduler.release(key)

    def step(self) -> StepOutputs | None:
        """Runs one step, or returns None when there is nothing to do."""
        plan = self.plan()
        if plan is None:
            return None
        self.launch(plan)
        return self.collect()

    def step_tokens(self) -> dict[Key, int]:
        """Runs one step; the tokens it brought, by sequence."""
        outputs = self.step()
        return {} if outputs is None else outputs.progress.by_key()

    def plan(self) -> Plan | None:
        """The next step, or None. One that was planned must be launched and collected, also when it has no chunks."""
        assert self._in_flight is None, "a step is in flight"
        self._planned_at = self._clock()
        self.scheduler.expire(self._planned_at)
        plan = self.scheduler.plan()
        self._trace.plan(plan, self._planned_at)
        return plan

    def launch(self, plan: Plan) -> None:
        """Hands the step to the runner, which may still compute when this returns."""
        self._in_flight = (plan, self._clock())
        self._runner.launch(plan)

    def collect(self) -> StepOutputs:
        """The outputs of the step that was launched; waits for the runner."""
        assert self._in_flight is not None, "no step is in flight"
        (plan, launched_at), self._in_flight = self._in_flight, None
        computed = self._runner.collect()
        collected_at = self._clock()
        progress = self.scheduler.apply(plan, computed.token_ids, computed.failed, computed.candidates)
        self.scheduler.observe(plan, collected_at - self._planned_at)
        stats = self.stats
        self.history.append(StepRecord.of(plan, stats, launched_at=launched_at, collected_at=collected_at))
        outputs = StepOutputs(
            plan, progress, computed.logprobs, stats, self._planned_at, launched_at, collected_at
        )  # fmt: skip
        self._trace.write(outputs)
        return outputs

    def check(self) -> None:
        """Proves that no page and no sequence is lost; see ``audit.check``."""
        check(self.scheduler)

    def _build_inputs(self, plan: Plan) -> StepInputs:
        scheduler = self.scheduler
        return build_inputs(plan, scheduler.running, scheduler.rows, page_size=scheduler.cache.pool.page_size)
