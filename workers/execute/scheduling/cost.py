"""The cost of a step, learned from previous steps, and the largest chunk that keeps the next step short."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....protocol.arrays import Float64
from ....protocol.config import SchedulerConfig
from .plan import Plan

_WINDOW = 128  # steps remembered of each kind
_MIN_STEPS = 8  # required before anything is predicted
_REFIT_STEPS = 16  # new steps after which the fit is renewed
_UNITS = np.array([1.0, 1e-2, 1e-1, 1e-4])  # scale a step's numbers to about one, for the solver
_OUTLIER = 5.0  # times the median error: a step that was disturbed from outside
_CONFIDENCE = 0.95  # the share of steps that should take no longer than predicted


class Work(NamedTuple):
    """What a step computes, in the quantities that its time depends on."""

    num_prefill_tokens: int
    num_decodes: int  # and proposals
    num_reads: int  # tokens of context, of prompts and decodes together

    @classmethod
    def of(cls, plan: Plan) -> Work:
        num_prefill_tokens = plan.num_prefill_tokens
        return cls(num_prefill_tokens, plan.num_tokens - num_prefill_tokens, plan.num_reads)


class Prices(NamedTuple):
    """Mean cost of a step in milliseconds: a constant, and a price for each quantity of its ``Work``."""

    step: float
    prefill_token: float
    decode: float
    read: float

    def of(self, work: Work) -> float:
        return (
            self.step
            + self.prefill_token * work.num_prefill_tokens
            + self.decode * work.num_decodes
            + self.read * work.num_reads
        )


def fit_prices(works: list[Work], times_ms: list[float]) -> Prices:
    """The prices that explain these step times, without outliers. None is negative."""
    prices, _ = _fit(_features(works), np.array(times_ms))
    return Prices(*map(float, prices * _UNITS))


class CostModel:
    """Milliseconds of a step as a sum: a constant, and a price for each prompt token, decode, and token of context.

    Steps with and without prompts are remembered separately, so that a long run of pure decode steps does not displace
    the data on prompts. Prices are never negative.
    """

    def __init__(self) -> None:
        self._steps: tuple[deque[tuple[Work, float]], ...] = (deque(maxlen=_WINDOW), deque(maxlen=_WINDOW))
        self._num_unfitted = 0
        self._prices: Float64 | None = None  # [4], per unit
        self._margin_ms = 0.0

    def fit(self, work: Work, elapsed_ms: float) -> None:
        """Add a step and its time."""
        self._steps[work.num_prefill_tokens > 0].append((work, elapsed_ms))
        self._num_unfitted += 1

    def predict(self, work: Work) -> float | None:
        """Milliseconds that the step will most likely not exceed; None if too few steps are known."""
        if not self._refresh():
            return None
        assert self._prices is not None
        return float(_features([work])[0] @ self._prices) + self._margin_ms

    def prefill_tokens(self, target_ms: float, rest: Work) -> int | None:
        """Prompt tokens that fit next to ``rest`` into a step of ``target_ms``; None if that is not known yet.

        The margin for varying times takes at most half of the room: if variance alone exceeds the target, shorter
        prompts would not help, and must not be stopped.
        """
        predicted_ms = self.predict(rest)
        if predicted_ms is None:
            return None
        assert self._prices is not None
        _, token_ms, _, read_ms = self._prices * _UNITS
        room_ms = target_ms - (predicted_ms - self._margin_ms)
        room_ms -= min(self._margin_ms, room_ms / 2)
        return int(max(0.0, room_ms) / max(token_ms + read_ms, 1e-9))

    def _refresh(self) -> bool:
        """Whether there is a fit; renews it when due."""
        num_steps = sum(map(len, self._steps))
        if self._num_unfitted >= min(_REFIT_STEPS, max(1, num_steps // 4)) and num_steps >= _MIN_STEPS:
            self._num_unfitted = 0
            works, times = zip(*(step for kind in self._steps for step in kind), strict=True)
            x, y = _features(list(works)), np.array(times)
            self._prices, is_usual = _fit(x, y)
            self._margin_ms = max(0.0, float(np.quantile(y[is_usual] - x[is_usual] @ self._prices, _CONFIDENCE)))
        return self._prices is not None


class Pace:
    """Limits chunks so that decoding sequences keep to ``target_ms`` from token to token."""

    def __init__(self, target_ms: float, *, min_tokens: int, granted_tokens: int) -> None:
        self._target_ms = target_ms
        self._min_tokens = min_tokens
        self._granted_tokens = granted_tokens
        self._model = CostModel()

    def observe(self, plan: Plan, elapsed_ns: int) -> None:
        self._model.fit(Work.of(plan), elapsed_ns / 1e6)

    def max_prefill_tokens(self, rest: Work, *, must_progress: bool) -> int | None:
        """Prompt tokens of a step next to ``rest``; None: no limit.

        Fewer than ``min_tokens`` are not worth it. With ``must_progress`` some are granted in any case.
        """
        num_tokens = self._model.prefill_tokens(self._target_ms, rest)
        if num_tokens is None or num_tokens >= self._min_tokens:
            return num_tokens
        return self._granted_tokens if must_progress else 0


def make_pace(config: SchedulerConfig, page_size: int) -> Pace | None:
    """None without a target. If the target cannot be met at all, a chunk is spread over as many pieces as steps may
    skip it, so that the prompt still progresses.
    """
    if config.itl_target_ms is None:
        return None
    granted_tokens = max(page_size, config.chunk_tokens // config.max_prefill_skip)
    return Pace(config.itl_target_ms, min_tokens=page_size, granted_tokens=granted_tokens)


def _features(works: list[Work]) -> Float64:
    """[N, 4]: a constant, prompt tokens, decodes and reads, in ``_UNITS``."""
    features: Float64 = np.array([(1, *work) for work in works], np.float64) * _UNITS
    return features


def _fit(x: Float64, y: Float64) -> tuple[Float64, npt.NDArray[np.bool_]]:
    """Coefficients [4], and which steps they were fitted to."""
    errors = np.abs(y - x @ _least_squares(x, y))
    is_usual = errors <= _OUTLIER * np.median(errors) + 1e-9
    return _least_squares(x[is_usual], y[is_usual]), is_usual


def _least_squares(x: Float64, y: Float64) -> Float64:
    """Coefficients [4], none below zero: those that would be negative are dropped one by one.

    Costs that the steps cannot tell apart are shared evenly (the smallest solution).
    """
    used = list(range(x.shape[1]))
    prices = np.zeros(x.shape[1])
    while used:
        solution = np.linalg.lstsq(x[:, used], y, rcond=1e-8)[0]
        if solution.min() >= 0:
            prices[used] = solution
            break
        used.pop(int(solution.argmin()))
    return prices
