"""Beam search without pages: which hypotheses continue, which have ended, and when the search is over.

The rules are those of ``generate(num_beams=...)`` in transformers 5, so that results are identical token for token: the
best continuations of all beams compete by their sum of logprobs; those that end among the best ``num_beams`` become
hypotheses, scored by ``sum / length ** length_penalty``; the best of the others continue.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from ....protocol.arrays import Float32, Int32
from ....protocol.sampling import SamplingParams


class Candidates(NamedTuple):
    """The likeliest next tokens of one beam, best first."""

    token_ids: Int32  # [c]
    logprobs: Float32  # [c], after the request's logit adjustments


class Branch(NamedTuple):
    """A beam of the next step: an earlier beam plus one token."""

    parent: int
    token_id: int
    score: np.float32  # sum of logprobs


class Hypothesis(NamedTuple):
    """A finished answer."""

    tokens: list[int]
    score: float  # the sort key, highest first
    reason: str  # "stop" | "length"


def num_candidates(params: SamplingParams, num_stop_ids: int) -> int:
    """How many continuations compete, so that ``num_beams`` remain whatever ends. No beam needs more candidates."""
    return max(2, 1 + num_stop_ids) * params.num_beams


class Search(Protocol):
    """Chooses the beams of one search. ``advance`` is called once for each token."""

    hypotheses: list[Hypothesis]  # best first

    def advance(self, outputs: list[list[int]], candidates: list[Candidates]) -> list[Branch]:
        """The beams of the next step, best first; none if the search is over.

        ``outputs`` are the tokens of the current beams, in the order in which they were returned.
        """
        ...


class BeamSearch:
    """A search that has the candidates of every continuing beam."""

    def __init__(self, params: SamplingParams, *, stop_ids: frozenset[int], max_tokens: int) -> None:
        self._params = params
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._num_kept = num_candidates(params, len(stop_ids))
        self._scores = [np.float32(0)]  # of the continuing beams, best first; initially there is one
        self.hypotheses: list[Hypothesis] = []  # best first

    def advance(self, outputs: list[list[int]], candidates: list[Candidates]) -> list[Branch]:
        """See ``Search``."""
        width, length = self._params.num_beams, len(outputs[0]) + 1
        best = self._best(candidates)
        ends = [self._end_reason(branch.token_id, length) for branch in best]
        for branch, reason in zip(best[:width], ends, strict=False):
            if reason is not None:
                self._finish(branch, outputs[branch.parent], reason, length)
        running = [branch for branch, reason in zip(best, ends, strict=True) if reason is None][:width]
        self._scores = [branch.score for branch in running]
        return running if running and not self._is_over(length) else []

    def _best(self, candidates: list[Candidates]) -> list[Branch]:
        """The best continuations of all beams; among equals the earlier beam's, then the likelier token's."""
        totals = [score + found.logprobs for score, found in zip(self._scores, candidates, strict=True)]
        parents = np.repeat(np.arange(len(candidates)), [len(total) for total in totals])
        scores, token_ids = np.concatenate(totals), np.concatenate([found.token_ids for found in candidates])
        order = np.argsort(-scores, kind="stable")[: self._num_kept]
        return [Branch(int(parents[i]), int(token_ids[i]), scores[i]) for i in order]

    def _end_reason(self, token_id: int, length: int) -> str | None:
        if token_id in self._stop_ids and length >= max(1, self._params.min_tokens):
            return "stop"
        return "length" if length >= self._max_tokens else None

    def _finish(self, branch: Branch, output: list[int], reason: str, length: int) -> None:
        score = float(branch.score / self._divisor(length))
        hypotheses = [*self.hypotheses, Hypothesis([*output, branch.token_id], score, reason)]
        self.hypotheses = sorted(hypotheses, key=lambda h: -h.score)[: self._params.num_beams]

    def _is_over(self, length: int) -> bool:
        """Whether no continuing beam is expected to beat the worst of enough hypotheses.

        A beam's attainable score is estimated at the current length; with "never" and a penalty that favours long
        answers, at the greatest length.
        """
        if len(self.hypotheses) < self._params.num_beams:
            return False
        if self._params.early_stopping is True:
            return True
        is_patient = self._params.early_stopping == "never" and self._params.length_penalty > 0
        possible = self._scores[0] / self._divisor(self._max_tokens if is_patient else length)
        return bool(possible <= np.float32(self.hypotheses[-1].score))

    def _divisor(self, length: int) -> np.float32:
        return np.float32(float(length) ** self._params.length_penalty)
