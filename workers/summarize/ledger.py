"""Where a request's time went: stages that add up to the wall time, to the nanosecond."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

# In the order a request passes them: the stage, and the mark that ends it. A stage may have several parts.
_STAGE_ENDS = (
    ("queue", "tokenize_start"),  # behind other prompts in prepare
    ("tokenize", "tokenize_end"),
    ("tokenize", "accepted"),  # admission, and the record in the journal
    ("credit", "dispatched"),  # until as few sequences live as execute takes
    ("schedule", "scheduled"),  # on the way to execute, and waiting there for the first chunk's step
    ("prefill", "first_token"),
    ("decode", "last_token"),
    ("wire", "arrived"),
    ("detokenize", "text_done"),
    ("deliver", "sent"),
)
_BEFORE_A_TOKEN = ("prefill", "schedule", "credit")  # where a preemption or a crash can hit, likeliest first
STAGES = (*dict.fromkeys(stage for stage, _ in _STAGE_ENDS), "preempted", "recovered")


@dataclass(slots=True, kw_only=True)
class Marks:
    """What is known of one request: times, ns of CLOCK_MONOTONIC, which all processes of a machine share, 0: not
    reached; and what else its account has.
    """

    received: int
    tokenize_start: int = 0
    tokenize_end: int = 0
    accepted: int = 0
    dispatched: int = 0
    scheduled: int = 0  # the step of its first chunk began
    first_token: int = 0
    last_token: int = 0
    arrived: int = 0  # the last token, in summarize
    text_done: int = 0
    sent: int = 0  # the terminal message
    preempted_ns: int = 0  # without pages while it could have run, all times together
    recovered_ns: int = 0  # from the death of a worker until its next token
    lost_early_ns: int = 0  # of both, before the first token
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    token_times: list[int] = field(default_factory=list)  # [num_output_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class InterTokenTimes:
    """Gaps between tokens, ms, as execute made them."""

    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The account that comes with an answer. ``stages_ns`` has every name of ``STAGES`` and adds up to ``wall_ns``."""

    wall_ns: int  # from received to the last mark reached
    stages_ns: dict[str, int]
    ttft_ms: float | None  # from received to the first token
    tps: float | None  # (n - 1) / (t_n - t_1), preemptions included; None for fewer than two tokens
    inter_token_ms: InterTokenTimes | None
    num_cached_tokens: int
    num_preemptions: int

    def to_wire(self) -> dict[str, Any]:
        wire = dataclasses.asdict(self)
        wire["wall_ms"] = _ms(wire.pop("wall_ns"))
        wire["stages_ms"] = {stage: _ms(ns) for stage, ns in wire.pop("stages_ns").items()}
        return wire


def make_ledger(marks: Marks) -> Ledger:
    """The account of a request that ended, wherever it ended."""
    stages_ns = book_stages(marks)
    return Ledger(
        wall_ns=sum(stages_ns.values()),
        stages_ns=stages_ns,
        ttft_ms=_ms(marks.first_token - marks.received) if marks.first_token else None,
        tps=_tokens_per_second(marks.token_times),
        inter_token_ms=_inter_token_times(marks.token_times),
        num_cached_tokens=marks.num_cached_tokens,
        num_preemptions=marks.num_preemptions,
    )


def book_stages(marks: Marks) -> dict[str, int]:
    """ns by stage, every one of ``STAGES``; what lies between the last mark and ``sent`` is where it stands then."""
    stages_ns = dict.fromkeys(STAGES, 0)
    now, stage = marks.received, None
    for name, end in _STAGE_ENDS:
        # A stage that never ended is where the request was when it ended: the time until the next mark is its.
        stage = stage or name
        if mark := getattr(marks, end):
            # A mark may lie before an earlier one: a worker that restarted does its part again.
            stages_ns[stage] += max(mark - now, 0)
            now, stage = max(mark, now), None
    lost_ns = marks.preempted_ns + marks.recovered_ns
    early_ns = min(marks.lost_early_ns, lost_ns)
    taken_ns = _take(stages_ns, _BEFORE_A_TOKEN, early_ns)
    taken_ns += _take(stages_ns, ("decode", *_BEFORE_A_TOKEN), lost_ns - early_ns)
    stages_ns["preempted"] = min(marks.preempted_ns, taken_ns)
    stages_ns["recovered"] = taken_ns - stages_ns["preempted"]
    return stages_ns


def _take(stages_ns: dict[str, int], stages: Sequence[str], duration_ns: int) -> int:
    """Take time that was lost out of the stages it fell into, never more than they have; how much that was."""
    left_ns = duration_ns
    for stage in stages:
        moved = min(left_ns, stages_ns[stage])
        stages_ns[stage] -= moved
        left_ns -= moved
    return duration_ns - left_ns


def _tokens_per_second(token_times: Sequence[int]) -> float | None:
    if len(token_times) < 2 or token_times[-1] <= token_times[0]:
        return None
    return (len(token_times) - 1) * 1e9 / (token_times[-1] - token_times[0])


def _inter_token_times(token_times: Sequence[int]) -> InterTokenTimes | None:
    if len(token_times) < 2:
        return None
    times = np.array(token_times, np.int64)
    gaps_ms = np.sort(times[1:] - times[:-1]) / 1e6
    p50, p90, p99 = (_percentile(gaps_ms, percent) for percent in (50, 90, 99))
    return InterTokenTimes(p50=p50, p90=p90, p99=p99, max=float(gaps_ms[-1]))


def _percentile(ordered: npt.NDArray[np.float64], percent: int) -> float:
    """As ``np.percentile``, which takes ten times as long for what is sorted already."""
    place, part = divmod((len(ordered) - 1) * percent, 100)
    below, above = float(ordered[place]), float(ordered[min(place + 1, len(ordered) - 1)])
    return below + (above - below) * part / 100


def _ms(duration_ns: int) -> float:
    return duration_ns / 1e6
