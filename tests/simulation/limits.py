"""What a step may contain, and how often steps are reported, which is the same in other runs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.simulation.plan import Plan


def set_limits(plan: Plan, dice: random.Random) -> None:
    limits: dict[str, Any] = {
        "max_num_batched_tokens": dice.choice((None, 1, 3, 9)),
        "max_kv_reads": dice.choice((None, 1, 15, 40)),
        "mixed_prefill_tokens": dice.choice((None, 1, 4)),
        "itl_target_ms": dice.choice((None, None, 0.1, 5.0)),
        "safety_margin": dice.choice((None, 0.0, 1.0)),
        "max_prefill_skip": dice.choice((1, 2, 8)),
        "max_decode_skip": dice.choice((1, 2, 8)),
        "decode_join_fill": dice.choice((0.0, 0.5, 1.0)),
        "skip_ahead": dice.choice((0, 0, 1, 3)),
        "priority_ageing": dice.choice((1, 64)),
    }
    service = replace(plan.config.service, report_interval_ms=dice.choice((0.0, 1.0, 100.0)))
    plan.config = replace(plan.config, scheduler=replace(plan.config.scheduler, **limits), service=service)
