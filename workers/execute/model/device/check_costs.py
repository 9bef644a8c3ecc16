"""What it costs a GPU to check proposals, measured when its graphs are there."""

from __future__ import annotations

import logging
import time

from ...scheduling.proposals import CheckCosts
from ...step import StepInputs
from ..step_runner import StepRunner, trash_checks, trash_decodes, with_longest_tables
from .buckets import CHECKED_TOKENS, num_checked_together

logger = logging.getLogger(__name__)

_TRIALS = 5
_PLANNING_S = 2e-4  # that a step takes longer if it is not planned ahead, besides its launch (0.15 ms with an H200)
_FINDING_S = 3e-5  # to find the proposals of one sequence in its tokens (25 us on an AMD EPYC)
_LEAST_TOKEN = 0.001  # a row of logits and of activations: 4 us in a step of 4 ms with an H200

# What is expected of an 8B model: from 64 rows to 256, its products take 2.1 ms more of 4.5 with an H200.
EXPECTED = CheckCosts(token=0.0025, sequence=0.0075, step=0.35, max_tokens=CHECKED_TOKENS, beside_prompts=False)


def measure_check_costs(runner: StepRunner, *, max_rows: int, max_proposals: int, max_pages: int) -> CheckCosts:
    """Return the costs for up to ``max_proposals`` for each of ``max_rows`` sequences, as shares of one decode.

    A step with proposals is launched when the one before it is known. No sequence has more than ``max_pages`` pages.
    """
    length, num_seqs = 1 + max_proposals, num_checked_together(max_rows, max_proposals)
    decode_s = measure_decode(runner, 1, max_pages=max_pages)
    steps = (trash_checks(1, length), trash_checks(num_seqs, length))
    (_, few_s), (_, many_s) = (_seconds(runner, with_longest_tables(inputs, max_pages)) for inputs in steps)
    token_s = (many_s - few_s) / max(1, (num_seqs - 1) * length)
    costs = CheckCosts(
        token=max(_LEAST_TOKEN, token_s / decode_s),
        sequence=_FINDING_S / decode_s,
        step=max(0.0, (few_s + _PLANNING_S) / decode_s - 1),
        max_tokens=CHECKED_TOKENS,
        beside_prompts=False,
    )
    logger.info("to check proposals takes %.2f of a step, and %.4f for each", costs.step, costs.token)
    return costs


def measure_decode(runner: StepRunner, num_rows: int, *, max_pages: int) -> float:
    """Return the seconds of a decode of so many sequences. The host launches it while the device computes the one
    before it, so the longer of both counts.
    """
    # With tables that a graph has room for, whatever the size of a page is.
    launch_s, total_s = _seconds(runner, with_longest_tables(trash_decodes(num_rows), max_pages))
    return max(launch_s, total_s - launch_s)


def _seconds(runner: StepRunner, inputs: StepInputs) -> tuple[float, float]:
    """Return the times of launching a step, and of the whole step."""
    found = []
    for _ in range(_TRIALS):
        start = time.perf_counter()
        runner.launch(inputs)
        launched = time.perf_counter()
        runner.collect()
        found.append((launched - start, time.perf_counter() - start))
    return min(found, key=lambda times: times[1])
