"""The masks of a step, computed in threads while the model computes its logits."""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..scheduling.sequence import Sequence
from .matcher import Bits, GrammarMatcher, Int32, ids_of

ROWS_A_JOB = 8  # a mask usually takes tens of microseconds, about what handing it to a thread costs
MAX_THREADS = 4
TIMEOUT_S = 1.0


class TokenMasks(NamedTuple):
    """What the grammars of a step's rows leave."""

    allowed: dict[int, Bits]  # rows without a grammar are not in it
    failed: dict[int, str]  # row -> why its grammar says nothing


NO_MASKS = TokenMasks({}, {})


class _Row(NamedTuple):
    row: int
    matcher: GrammarMatcher
    output_tokens: Int32


@dataclass(slots=True)
class _Job:
    """Some rows, one after the other. Results come in the order of the rows."""

    rows: list[_Row]
    results: list[Bits | str] = field(default_factory=list)
    has_begun: bool = False
    is_abandoned: bool = False

    def run(self) -> None:
        self.has_begun = True
        for _, matcher, output_tokens in self.rows:
            if self.is_abandoned:
                return
            result: Bits | str
            try:
                result = matcher.allowed_after(output_tokens)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic of the library's Rust code is not an Exception
                result = f"the grammar cannot go on: {error!s:.200}"
            self.results.append(result)


class MaskMaker:
    """Starts the masks of steps. Its threads start with the first mask."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s  # that a step waits for a mask, beyond which its row fails
        self._threads = _make_threads()

    def begin(self, sampled: Rows[Sequence]) -> PendingMasks | None:
        """The masks of the rows that have a grammar, under way; None if there are none."""
        rows = [
            _Row(row, sequence.grammar, sequence.output_tokens.copy())
            for row, sequence in enumerate(sampled)
            if isinstance(sequence.grammar, GrammarMatcher)
        ]
        return PendingMasks(self, rows) if rows else None

    def submit(self, job: _Job) -> Future[None]:
        return self._threads.submit(job.run)

    def replace_threads(self) -> None:
        """One of them is stuck in a mask. It ends when that does; the next masks shall not wait for it."""
        self._threads.shutdown(wait=False)
        self._threads = _make_threads()


class PendingMasks:
    """The masks of one step."""

    def __init__(self, maker: MaskMaker, rows: list[_Row]) -> None:
        self._maker = maker
        chunks = (rows[start : start + ROWS_A_JOB] for start in range(0, len(rows), ROWS_A_JOB))
        self._jobs = self._submit(_Job(chunk) for chunk in chunks)

    def wait(self) -> TokenMasks:
        """All of them; a row whose mask takes too long has failed."""
        masks = TokenMasks({}, {})
        while self._jobs:
            late = wait([future for _, future in self._jobs], self._maker.timeout_s).not_done
            stuck = [job for job, future in self._jobs if future in late]
            for job in stuck:
                job.is_abandoned = True
            if stuck:
                self._maker.replace_threads()
            jobs, self._jobs = self._jobs, []
            for job, _ in jobs:
                _collect(job, masks)
            self._jobs = self._submit(_give_up_first(job, masks, self._maker.timeout_s) for job in stuck)
        return masks

    def _submit(self, jobs: Iterable[_Job]) -> list[tuple[_Job, Future[None]]]:
        return [(job, self._maker.submit(job)) for job in jobs if job.rows]


def _collect(job: _Job, masks: TokenMasks) -> None:
    """Moves what a job has done to the masks; the rows that are left stay in it."""
    results, rows = list(job.results), job.rows
    for (row, _, _), result in zip(rows, results, strict=False):
        if isinstance(result, str):
            masks.failed[row] = result
        else:
            masks.allowed[row] = result
    job.rows = rows[len(results) :]


def _give_up_first(job: _Job, masks: TokenMasks, timeout_s: float) -> _Job:
    """The rows of an abandoned job without the one it is stuck in, which has failed."""
    if not (job.has_begun and job.rows):  # stuck behind others, or through after all
        return _Job(job.rows)
    masks.failed[job.rows[0].row] = f"the grammar takes longer than {timeout_s} s to say what may follow"
    return _Job(job.rows[1:])


def _make_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="masks")


def first_allowed(allowed: Bits, token_id: int) -> int:
    """The first id that is allowed, from ``token_id`` on and then from 0."""
    ids = ids_of(allowed)
    return int(ids[np.searchsorted(ids, token_id) % len(ids)])
