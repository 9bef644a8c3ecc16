"""Histograms over requests, compared with the values added to them."""

from __future__ import annotations

import numpy as np
import pytest

from triptych.protocol.messages import LEDGER_STAGES
from triptych.workers.summarize.histograms import Histogram, RequestHistograms
from triptych.workers.summarize.ledger import Marks, make_ledger

MS = 1_000_000


def test_value_counts_at_the_smallest_bound_not_below_it() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 4.0, 4.1):
        histogram.observe(value)
    histogram.observe(np.array([2.0, 100.0]))
    assert histogram.to_wire() == {"bounds": [1.0, 2.0, 4.0], "counts": [2, 2, 1, 2], "sum": pytest.approx(113.1)}


def test_request_counts_once_in_each_histogram_and_its_gaps_one_by_one() -> None:
    histograms = RequestHistograms()
    times = [1000 * MS, 1010 * MS, 1030 * MS]
    marks = Marks(received=900 * MS, scheduled=950 * MS, first_token=times[0], last_token=times[-1], sent=1040 * MS)
    histograms.observe(make_ledger(marks), token_times_ns=times, num_prompt_tokens=7)
    wire = histograms.to_wire()
    sums = {name: (sum(wire[name]["counts"]), wire[name]["sum"]) for name in wire if name != "stages_s"}
    assert sums["inter_token_s"] == (2, pytest.approx(0.03))
    assert sums["time_per_output_token_s"] == (1, pytest.approx(0.015))
    assert sums["e2e_s"] == (1, pytest.approx(0.14))
    assert sums["ttft_s"] == (1, pytest.approx(0.1))
    assert sums["queue_s"] == (1, pytest.approx(0.05))
    assert sums["prefill_s"] == (1, pytest.approx(0.05))
    assert sums["decode_s"] == (1, pytest.approx(0.03))
    assert sums["inference_s"] == (1, pytest.approx(0.08))
    assert sums["prompt_tokens"] == (1, 7)
    assert set(wire["stages_s"]) == set(LEDGER_STAGES)
    assert sum(wire["stages_s"].values()) == pytest.approx(0.14)


def test_request_that_never_ran_has_no_first_token() -> None:
    histograms = RequestHistograms()
    histograms.observe(make_ledger(Marks(received=MS, sent=2 * MS)), token_times_ns=[], num_prompt_tokens=1)
    wire = histograms.to_wire()
    assert (sum(wire["ttft_s"]["counts"]), sum(wire["inter_token_s"]["counts"]), sum(wire["e2e_s"]["counts"])) == (
        0,
        0,
        1,
    )
