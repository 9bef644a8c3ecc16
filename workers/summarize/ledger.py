"""Where a request's time went: stages that add up to the wall time, to the nanosecond."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...protocol.messages import LEDGER_STAGES

# In the order in which a request passes them: the stage, and the mark that ends it. A stage may have several parts.
_STAGE_ENDS = (
    ("queue", "tokenize_start"),  # behind other prompts in prepare
    ("tokenize", "tokenize_end"),
    ("tokenize", "accepted"),  # admission, and the record in the journal
    ("credit", "dispatched"),  # until execute has few enough live sequences
    ("schedule", "scheduled"),  # in transit to execute, and waiting there for the first chunk's step
    ("prefill", "first_token"),
    ("decode", "last_token"),
    ("wire", "arrived"),
    ("detokenize", "text_done"),
    ("deliver", "sent"),
)
_BEFORE_A_TOKEN = ("prefill", "schedule", "credit")  # where a preemption or crash may occur, likeliest first


@dataclass(slots=True, kw_only=True)
class Marks:
    """What is known of one request: times in ns of the journal's clock (0: not reached), and the other figures of its
    ledger.
    """

    received: int
    tokenize_start: int = 0
    tokenize_end: int = 0
    accepted: int = 0
    dispatched: int = 0
    scheduled: int = 0  # the step of its first chunk began
    first_token: int = 0
    last_token: int = 0
    arrived: int = 0  # the last token, at summarize
    text_done: int = 0
    sent: int = 0  # the terminal message
    preempted_ns: int = 0  # total time without pages while it could have run
    recovered_ns: int = 0  # total time from the death of a worker until its next token
    lost_early_ns: int = 0  # the part of both before the first token
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    token_times: list[int] = field(default_factory=list)  # [num_output_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class InterTokenTimes:
    """Gaps between tokens in ms, by the times at which execute produced them."""

    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where a request's time went; part of its summary. ``stages_ns`` has all stages; its sum is ``wall_ns``."""

    wall_ns: int  # from receipt to the last mark reached
    stages_ns: dict[str, int]
    ttft_ms: float | None  # from receipt to the first token
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
    """The ledger of a request that ended, at whatever stage."""
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
    """ns by stage, for all stages; the time between the last mark and ``sent`` belongs to the current stage."""
    stages_ns = dict.fromkeys(LEDGER_STAGES, 0)
    now, stage = marks.received, None
    for name, end in _STAGE_ENDS:
        # A stage that never ended is where the request stopped: the time until the next mark belongs to it.
        stage = stage or name
        if mark := getattr(marks, end):
            # A mark may lie before an earlier one: a restarted worker repeats its part.
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
    """Take lost time out of the stages in which it occurred, at most what they have; returns how much that was."""
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
    """Like ``np.percentile``, which takes ten times as long on sorted input."""
    place, part = divmod((len(ordered) - 1) * percent, 100)
    below, above = float(ordered[place]), float(ordered[min(place + 1, len(ordered) - 1)])
    return below + (above - below) * part / 100


def _ms(duration_ns: int) -> float:
    return duration_ns / 1e6
