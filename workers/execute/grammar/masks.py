"""The masks of a step, computed in threads while the model computes its logits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ....protocol.arrays import Int32
from ..scheduling.sequence import Sequence
from .matcher import Bits, GrammarMatcher, ReasoningLimit, ids_of

ROWS_A_JOB = 8  # a mask usually takes tens of microseconds, about what handing it to a thread costs
MAX_THREADS = 4
TIMEOUT_S = 1.0
STOPPED_S = 0.5  # a wait that ends so much later was that of a stopped process


class TokenMasks(NamedTuple):
    """The masks of a step's rows."""

    allowed: dict[int, Bits]  # row -> the tokens it may choose from; rows without a grammar are absent
    failed: dict[int, str]  # row -> why it has no mask


NO_MASKS = TokenMasks({}, {})


class _Row(NamedTuple):
    row: int
    matcher: GrammarMatcher | ReasoningLimit
    output_tokens: Int32


@dataclass(slots=True, eq=False)
class _Job:
    """Some rows, computed one after the other; results are in the same order."""

    rows: list[_Row]
    results: list[Bits | str | None] = field(default_factory=list)
    row_began_at: float | None = None  # time.monotonic(), of the row being computed
    is_abandoned: bool = False

    def run(self) -> None:
        for _, matcher, output_tokens in self.rows:
            if self.is_abandoned:
                return
            self.row_began_at = time.monotonic()
            result: Bits | str | None
            try:
                result = matcher.allowed_after(output_tokens)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic of the library's Rust code is not an Exception
                result = f"the grammar failed: {error!s:.200}"
            self.results.append(result)

    def abandon_if_stuck(self, timeout_s: float) -> bool:
        """Whether the row being computed takes too long. If so, the job stops after it."""
        if self._is_stuck(timeout_s):
            self.is_abandoned = True
            return self._is_stuck(timeout_s)  # again: the job may have moved on to its next row in between
        return False

    def begin_anew(self) -> None:
        """Count the time of the row being computed from now on."""
        if self.row_began_at is not None:
            self.row_began_at = time.monotonic()

    def _is_stuck(self, timeout_s: float) -> bool:
        return self.row_began_at is not None and time.monotonic() - self.row_began_at >= timeout_s


class MaskMaker:
    """Starts computing the masks of steps. Its threads start with the first mask."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s  # how long a step waits for one mask before that row fails
        self._threads = _make_threads()

    def begin(self, sampled: Rows[Sequence]) -> PendingMasks | None:
        """Start computing the masks of the rows that have a grammar; None if there are none.

        A sequence with nothing left to limit loses its matcher, which would keep steps from being planned ahead.
        """
        rows: list[_Row] = []
        for row, sequence in enumerate(sampled):
            matcher = sequence.grammar
            if isinstance(matcher, ReasoningLimit) and matcher.is_over:
                sequence.grammar = None
            elif isinstance(matcher, (GrammarMatcher, ReasoningLimit)):
                rows.append(_Row(row, matcher, sequence.output_tokens.copy()))
        return PendingMasks(self, rows) if rows else None

    def submit(self, job: _Job) -> Future[None]:
        return self._threads.submit(job.run)

    def replace_threads(self) -> None:
        """Leave the threads to a mask that is stuck; they end when it does. Later masks must not wait for it."""
        self._threads.shutdown(wait=False)
        self._threads = _make_threads()


class PendingMasks:
    """The masks of one step."""

    def __init__(self, maker: MaskMaker, rows: list[_Row]) -> None:
        self._maker = maker
        chunks = (rows[start : start + ROWS_A_JOB] for start in range(0, len(rows), ROWS_A_JOB))
        self._jobs = self._submit(_Job(chunk) for chunk in chunks)

    def wait(self) -> TokenMasks:
        """All masks. A row whose own mask takes too long fails, no matter how long those before it took.

        If this process is stopped meanwhile, as in a paused container, so are the threads: their time begins anew.
        """
        masks, timeout_s = TokenMasks({}, {}), self._maker.timeout_s
        while self._jobs:
            until = time.monotonic() + (left_s := self._left_s())
            wait([future for _, future in self._jobs], left_s)
            late = [job for job, future in self._jobs if not future.done()]
            if time.monotonic() > until + STOPPED_S:
                for job in late:
                    job.begin_anew()
            stuck = [job for job in late if job.abandon_if_stuck(timeout_s)]
            behind: list[_Job] = []
            if stuck or (late and all(job.row_began_at is None for job in late)):
                self._maker.replace_threads()
                behind = [job for job, future in self._jobs if future.cancel()]
            # A row being computed stays in its thread: a matcher must not be used by two threads.
            going_on = [(job, f) for job, f in self._jobs if job in late and job not in stuck and job not in behind]
            over = [job for job, future in self._jobs if (job, future) not in going_on]
            for job in over:
                _collect(job, masks)
            for job in stuck:
                _give_up_first(job, masks, timeout_s)
            self._jobs = going_on + self._submit(_Job(job.rows) for job in over)
        return masks

    def _left_s(self) -> float:
        """Seconds until one of the rows being computed now takes too long."""
        now = time.monotonic()
        began = [job.row_began_at for job, future in self._jobs if not future.done()]
        return max(0.0, self._maker.timeout_s + min([at - now for at in began if at is not None], default=0.0))

    def _submit(self, jobs: Iterable[_Job]) -> list[tuple[_Job, Future[None]]]:
        return [(job, self._maker.submit(job)) for job in jobs if job.rows]


def _collect(job: _Job, masks: TokenMasks) -> None:
    """Move the results of a job to the masks; its remaining rows stay in it."""
    results, rows = list(job.results), job.rows
    for (row, _, _), result in zip(rows, results, strict=False):
        if isinstance(result, str):
            masks.failed[row] = result
        elif result is not None:
            masks.allowed[row] = result
    job.rows = rows[len(results) :]


def _give_up_first(job: _Job, masks: TokenMasks, timeout_s: float) -> None:
    """Fail the first remaining row of an abandoned job: the one it is stuck in."""
    if job.rows:  # otherwise it has just finished after all
        masks.failed[job.rows[0].row] = f"computing the tokens that the grammar allows takes longer than {timeout_s} s"
        job.rows = job.rows[1:]


def _make_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="masks")


def first_allowed(allowed: Bits, token_id: int) -> int:
    """The first allowed id at or after ``token_id``, wrapping around to 0."""
    ids = ids_of(allowed)
    return int(ids[np.searchsorted(ids, token_id) % len(ids)])
