"""Isolates the sequence that makes a step fail, so that the others continue."""

from __future__ import annotations

import logging
import traceback
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from .batch import build_inputs
from .scheduling.beam_search import Candidates
from .scheduling.plan import Plan
from .scheduling.proposals import VOID
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Key
from .step import PromptScores, PromptStates, Runner, StepInputs, StepResult, TokenLogprobs

logger = logging.getLogger(__name__)

_NO_NUMBER = "the logprobs of the prompt are not numbers"


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a step by sequence; a sequence that gets no token in this step can fail too."""

    token_ids: list[int] = field(default_factory=list)  # one for each of Plan.sampled; void if that sequence failed
    logprobs: dict[Key, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[Key, Candidates] = field(default_factory=dict)  # of the beams
    scores: dict[Key, PromptScores] = field(default_factory=dict)  # of prompt tokens
    states: dict[Key, PromptStates] = field(default_factory=dict)  # of prompts whose embeddings are wanted
    failed: dict[Key, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Launched:
    plan: Plan
    error: Exception | None = None  # of its launch
    is_void: bool = False  # launched behind a step that failed: its own outcome is meaningless


class IsolatingRunner:
    """Runs plans. When a step raises, it is bisected: a sequence that raises when run alone is to blame.

    One bad sequence of n costs about 2 log2(n) more runs. After an error that is fatal to the device (a sticky CUDA
    error) every sequence would raise: it is not caught, the process ends, and the one that replaces it finds the
    culprit.

    Running again is harmless: whatever the failed attempt wrote is overwritten with the same values. A step launched
    behind a failed one depends on tokens that do not exist: it is run again too, without the sequences that have ended
    since.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        """``scheduler`` has the sequences of the plans."""
        self._runner = runner
        self._scheduler = scheduler
        self._launched: deque[_Launched] = deque()

    @property
    def may_go_on(self) -> bool:
        """Whether it is valid and worthwhile to launch a step that depends on the tokens of the latest one."""
        return self._runner.hides_planning and not any(
            launched.error or launched.is_void for launched in self._launched
        )

    def launch(self, plan: Plan) -> None:
        launched = _Launched(plan)
        self._launched.append(launched)
        if plan.moves:
            # Not isolated: a failed move cannot be attributed to one sequence, and moves cannot be repeated. The error
            # ends the process, which restarts with empty pages.
            self._runner.move(plan.moves)
        if not plan.chunks:
            return
        try:
            self._runner.launch(self._inputs(plan, is_again=False))
        except Exception as error:
            _free_tensors(error)
            launched.error = error

    def collect(self) -> Computed:
        """The result of the oldest launched plan; waits for the runner."""
        launched = self._launched.popleft()
        plan = launched.plan
        if not plan.chunks:
            return Computed()
        if launched.is_void:
            return self._run(plan)
        try:
            if launched.error is not None:
                raise launched.error
            return _by_key(plan, self._runner.collect())
        except Exception as error:
            self._survive(error)
            self._abandon()
            with self._scheduler.ahead.rewound(plan, self._scheduler.running):
                return self._divide(plan, error)

    def _abandon(self) -> None:
        """Discard the steps launched since, which must run again."""
        for later in self._launched:
            if later.error is None and later.plan.chunks:
                try:
                    self._runner.collect()
                except Exception as error:
                    self._survive(error)
            later.is_void = bool(later.plan.chunks)

    def _divide(self, plan: Plan, error: Exception) -> Computed:
        if len(plan.chunks) == 1:
            chunk = plan.chunks[0]
            if chunk.proposed:  # try without the proposals, which are optional
                decode = chunk._replace(num_tokens=1, proposed=())
                alone = self._run(replace(plan, chunks=(decode,), num_decodes=1, num_checked=0))
                return replace(alone, token_ids=alone.token_ids + [VOID] * len(chunk.proposed))
            return Computed([0] * chunk.samples, failed={chunk.key: f"{type(error).__name__}: {error}"})
        logger.warning("step %d failed with %d sequences, now each half", plan.step, len(plan.chunks), exc_info=error)
        whole = Computed()
        for half in plan.halves():
            part = self._run(half)
            whole.token_ids.extend(part.token_ids)
            whole.logprobs.update(part.logprobs)
            whole.candidates.update(part.candidates)
            whole.scores.update(part.scores)
            whole.states.update(part.states)
            whole.failed.update(part.failed)
        return whole

    def _run(self, plan: Plan) -> Computed:
        """Run all or part of a step again, and wait for it."""
        if not all(chunk.key in self._scheduler.running for chunk in plan.chunks):
            return self._run_without_released(plan)
        try:
            self._runner.launch(self._inputs(plan, is_again=True))
            return _by_key(plan, self._runner.collect())
        except Exception as error:
            self._survive(error)
            return self._divide(plan, error)

    def _run_without_released(self, plan: Plan) -> Computed:
        rest = plan.part([chunk.key in self._scheduler.running for chunk in plan.chunks])
        computed = self._run(rest) if rest.chunks else Computed()
        here, token_ids = {chunk.key for chunk in rest.chunks}, iter(computed.token_ids)
        return replace(computed, token_ids=[next(token_ids) if key in here else 0 for key in plan.sampled])

    def _inputs(self, plan: Plan, *, is_again: bool) -> StepInputs:
        """``is_again``: of all or part of a plan that is run again, when all tokens before it are known."""
        scheduler = self._scheduler
        return build_inputs(
            plan,
            scheduler.running,
            scheduler.rows,
            page_size=scheduler.cache.pool.page_size,
            carried_rows={} if is_again else scheduler.ahead.carried_rows,
        )

    def _survive(self, error: Exception) -> None:
        """Re-raise the error if it is fatal, else free the memory that it holds."""
        if self._runner.is_fatal(error):
            raise error
        _free_tensors(error)


def _free_tensors(error: BaseException) -> None:
    """Free what the frames of its traceback hold: after a step that ran out of memory, its halves need that memory."""
    traceback.clear_frames(error.__traceback__)
    before = error.__cause__ or error.__context__
    if before is not None:
        _free_tensors(before)


def _by_key(plan: Plan, result: StepResult) -> Computed:
    """
    Raises:
        FloatingPointError: a sequence with proposals failed, and must be run without them to see if it still does.
    """
    if not (result.logprobs or result.candidates or result.failed or result.scores or result.states):
        return Computed(result.token_ids.tolist())
    sampled, token_ids = plan.sampled, result.token_ids.tolist()
    unsound = {scores.key: _NO_NUMBER for scores in result.scores if np.isnan(scores.columns.logprobs).any()}
    failed = {}
    for row, why in result.failed.items():
        if row and sampled[row] == sampled[row - 1]:  # follows a proposal: if that was right, the next step will tell
            token_ids[row] = VOID
        else:
            failed[sampled[row]] = why
    for chunk in plan.checked:
        if chunk.key in failed:  # a NaN also spoils rows that must not see it
            raise FloatingPointError(f"{failed[chunk.key]}, while proposed tokens were verified")
    return Computed(
        token_ids,
        logprobs={sampled[row]: logprobs for row, logprobs in result.logprobs.items()},
        candidates={sampled[row]: found for row, found in result.candidates.items()},
        scores={scores.key: scores for scores in result.scores},
        states={found.key: found for found in result.states},
        failed=failed | unsound,
    )
