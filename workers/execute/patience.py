"""How long the supervisor waits for the next sign of progress: a step that takes much longer counts as hung."""

from __future__ import annotations

from ...protocol.board import WorkerPage
from .scheduling.plan import Plan

FACTOR = 20  # a step that takes this many times as long as usual counts as hung
NUM_STEPS = 64  # after so many, the patience is lowered if they were faster


class Patience:
    """The patience on this worker's page of the board.

    Steps with prompts are told apart: on a CPU, a chunk of a prompt takes up to a hundred times as long as a step with
    one token of each answer, and after many of those it would count as hung. If a runner shows progress within a step,
    such a chunk needs only the patience for the longest of its parts.
    """

    def __init__(self, page: WorkerPage, *, full_step_s: float, num_parts: int = 1, least_s: float = 0.0) -> None:
        """``full_step_s``: the duration of a step that is as large as a step may be. ``num_parts``: see
        ``Runner.show_progress``.
        """
        self._page = page
        self._num_parts, self._num_latest_parts = num_parts, 1  # the latter of the latest step
        self.step_s = self._prompt_step_s = self._full_step_s = full_step_s  # rise at once, fall slowly
        self._least_s = least_s
        self._num_steps = 0
        self._publish(full_step_s)

    def begin(self, plan: Plan, *, scores: bool = False) -> None:
        """Before a step is launched. ``scores``: logprobs of up to 512 tokens follow, without a sign of progress."""
        self._num_latest_parts = 1 if scores else self._num_parts
        self._allow(plan)

    def _allow(self, plan: Plan) -> None:
        if plan.prefills:
            self._publish(max(self.step_s, self._prompt_step_s / self._num_latest_parts))

    def observe(self, plan: Plan, elapsed_s: float, *, ahead: Plan | None = None) -> None:
        """A step is complete; ``ahead`` is the one that was launched after it, if any."""
        self.step_s = _risen(self.step_s, elapsed_s)
        if plan.prefills:
            self._prompt_step_s = max(self._full_step_s, _risen(self._prompt_step_s, elapsed_s))
        self._num_steps += 1
        if self._num_steps % NUM_STEPS == 0:
            self._publish(self.step_s)
            if ahead is not None:
                self._allow(ahead)

    def _publish(self, step_s: float) -> None:
        self._page.set_patience(int(max(FACTOR * step_s, self._least_s) * 1e9))


def _risen(before_s: float, elapsed_s: float) -> float:
    return max(elapsed_s, 0.9 * before_s + 0.1 * elapsed_s)
