"""Mutations that need steps that raise and leave garbage; see ``mutations.py``."""

from __future__ import annotations

from tests.simulation.mutations import Patch, by_name
from triptych.workers.execute.isolation import IsolatingRunner
from triptych.workers.execute.scheduling.plan import Plan
from triptych.workers.execute.step import StepInputs


def steps_behind_a_failed_one_count(patch: Patch) -> None:
    """They continue from tokens that do not exist."""
    patch.setattr(IsolatingRunner, "_abandon", lambda self: None)


def steps_that_run_again_carry_tokens_over(patch: Patch) -> None:
    """From the step before, of which the device may have none any more."""
    real = IsolatingRunner._inputs

    def inputs(self: IsolatingRunner, plan: Plan, *, is_again: bool) -> StepInputs:
        return real(self, plan, is_again=False)

    patch.setattr(IsolatingRunner, "_inputs", inputs)


MISHAP_MUTATIONS = by_name(
    steps_behind_a_failed_one_count,
    steps_that_run_again_carry_tokens_over,
)
