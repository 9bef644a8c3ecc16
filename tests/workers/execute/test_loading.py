"""What execute does before it can serve, and settles once it knows the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.cards import CARD
from triptych.protocol.config import SchedulerConfig
from triptych.workers.execute.loading import CPU_MIXED_PREFILL_TOKENS, settle_scheduling


@pytest.mark.parametrize(
    ("device", "options", "settled"),
    [
        ("cpu", {}, CPU_MIXED_PREFILL_TOKENS),
        ("cpu", {"mixed_prefill_tokens": 7}, 7),
        ("cpu", {"itl_target_ms": 50.0}, None),  # finds its own
        ("cpu", {"policy": "prefill_first"}, None),
        ("cuda:0", {}, None),
    ],
)
def test_on_a_cpu_prompts_take_little_of_a_step(device: str, options: dict[str, Any], settled: int | None) -> None:
    config = settle_scheduling(SchedulerConfig(**options), replace(CARD, device=device))
    assert config.mixed_prefill_tokens == settled
