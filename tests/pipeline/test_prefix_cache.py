"""Cache hits found by the scheduler appear in the answer, the statistics and the trace."""

from __future__ import annotations

import json
from pathlib import Path

from tests.pipeline.checks import assert_quiet, expected
from tests.pipeline.conftest import hash_driver
from tests.waiting import eventually


def test_repeated_prompt_reports_its_cached_tokens(tmp_path: Path) -> None:
    prompt, trace = list(range(1, 101)), tmp_path / "steps.jsonl"
    with hash_driver(trace=str(trace)) as driver:
        answers = [driver.generate(prompt, max_tokens=8) for _ in range(2)]
        assert [answer.token_ids for answer in answers] == [expected(prompt, 8)] * 2
        assert [answer.usage["cached_tokens"] for answer in answers] == [0, 96]
        eventually(lambda: driver.stats()["execute"]["cache_hits"] == 96)
        assert_quiet(driver)
    starts = [start for line in trace.read_text().splitlines() for start in json.loads(line).get("starts", [])]
    assert [num_cached_tokens for _, num_cached_tokens in starts] == [0, 96]
