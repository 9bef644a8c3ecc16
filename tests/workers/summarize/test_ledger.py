"""Stages add up to the wall time, whatever was skipped or happened twice."""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.protocol.messages import LEDGER_STAGES
from triptych.workers.summarize.ledger import Ledger, Marks, make_ledger

MS = 1_000_000
ORDER = (
    "received",
    "tokenize_start",
    "tokenize_end",
    "accepted",
    "dispatched",
    "scheduled",
    "first_token",
    "last_token",
    "arrived",
    "text_done",
    "sent",
)


def make_marks(**changes: Any) -> Marks:
    """Each mark 1, 2, 4, ... ms after the previous one, from 1 s on: a difference identifies its interval."""
    times = accumulate((2**i * MS for i in range(len(ORDER) - 1)), initial=1000 * MS)
    return Marks(**{**dict(zip(ORDER, times, strict=True)), **changes})


def stages_ms(marks: Marks) -> dict[str, float]:
    """The stages with a nonzero time."""
    ledger = make_ledger(marks)
    return {stage: ns / MS for stage, ns in ledger.stages_ns.items() if ns}


def test_every_stage_lies_between_its_marks() -> None:
    assert stages_ms(make_marks()) == {
        "queue": 1,
        "tokenize": 2 + 4,
        "credit": 8,
        "schedule": 16,
        "prefill": 32,
        "decode": 64,
        "wire": 128,
        "detokenize": 256,
        "deliver": 512,
    }


@pytest.mark.parametrize(
    ("reached", "stage"),
    [(0, "queue"), (3, "credit"), (4, "schedule"), (5, "prefill"), (6, "decode")],
    ids=["before the tokenizer", "without a credit", "in the scheduler", "in prefill", "while decoding"],
)
def test_abort_is_attributed_to_the_stage_of_the_request(reached: int, stage: str) -> None:
    marks = Marks(received=1000, text_done=5000, sent=5001)
    for mark in ORDER[1 : reached + 1]:
        setattr(marks, mark, 1000)
    ledger = make_ledger(marks)
    assert {name: ns for name, ns in ledger.stages_ns.items() if ns} == {stage: 4000, "deliver": 1}


def test_interruptions_are_subtracted_from_the_stages_they_happened_in() -> None:
    stages = stages_ms(make_marks(preempted_ns=60 * MS, recovered_ns=10 * MS))
    assert (stages["preempted"], stages["recovered"]) == (60, 10)
    assert (stages.get("decode"), stages["prefill"]) == (None, 32 - 6)


def test_time_lost_before_the_first_token_is_not_subtracted_from_decoding() -> None:
    stages = stages_ms(make_marks(preempted_ns=20 * MS, recovered_ns=10 * MS, lost_early_ns=25 * MS))
    assert (stages["preempted"], stages["recovered"]) == (20, 10)
    assert (stages["decode"], stages["prefill"]) == (64 - 5, 32 - 25)


def test_interruptions_subtract_no_more_than_a_stage_has() -> None:
    stages = stages_ms(make_marks(preempted_ns=10**15))
    assert stages["preempted"] == 8 + 16 + 32 + 64
    assert sum(stages.values()) == 2**10 - 1


@settings(max_examples=300, deadline=None)
@given(
    times=st.lists(st.just(0) | st.integers(100, 10_000), min_size=len(ORDER) - 1, max_size=len(ORDER) - 1),
    preempted_ns=st.integers(0, 20_000),
    recovered_ns=st.integers(0, 20_000),
    lost_early_ns=st.integers(0, 20_000),
)
def test_stages_add_up_with_missing_or_unordered_marks(
    times: list[int], preempted_ns: int, recovered_ns: int, lost_early_ns: int
) -> None:
    marks = Marks(received=100, preempted_ns=preempted_ns, recovered_ns=recovered_ns, lost_early_ns=lost_early_ns)
    for mark, time in zip(ORDER[1:], times, strict=True):
        setattr(marks, mark, time)
    ledger = make_ledger(marks)
    assert set(ledger.stages_ns) == set(LEDGER_STAGES)
    assert min(ledger.stages_ns.values()) >= 0
    assert ledger.wall_ns == max(100, *times) - 100


def timed(*times_ms: int, **more: Any) -> Ledger:
    times = [1000 * MS + time * MS for time in times_ms]
    ends = {"first_token": times[0], "last_token": times[-1]} if times else {}
    return make_ledger(Marks(received=990 * MS, token_times=times, **ends, **more))


def test_tps_counts_the_gaps_between_tokens() -> None:
    assert timed(0, 10, 20, 50).tps == pytest.approx(3 / 0.050)


@pytest.mark.parametrize("times_ms", [(), (5,), (5, 5)], ids=["no token", "one token", "two at once"])
def test_tps_of_zero_time_is_unknown(times_ms: tuple[int, ...]) -> None:
    assert timed(*times_ms).tps is None


def test_time_to_first_token_counts_from_the_submit() -> None:
    assert timed(0, 10).ttft_ms == 10
    assert timed().ttft_ms is None


def test_inter_token_times_are_those_of_the_gaps() -> None:
    gaps = timed(0, 10, 20, 30, 130).inter_token_ms
    assert gaps is not None
    assert (gaps.p50, gaps.max) == (10, 100)
    assert gaps.p50 <= gaps.p90 <= gaps.p99 <= gaps.max
    assert timed(0).inter_token_ms is None


def test_wire_format_is_plain_and_in_ms() -> None:
    wire = timed(0, 10, num_cached_tokens=7, num_preemptions=2).to_wire()
    assert (wire["wall_ms"], wire["num_cached_tokens"], wire["num_preemptions"]) == (20.0, 7, 2)
    assert sum(wire["stages_ms"].values()) == pytest.approx(wire["wall_ms"])
    assert set(wire["inter_token_ms"]) == {"p50", "p90", "p99", "max"}
    assert not any(dataclasses.is_dataclass(value) for value in wire.values())
