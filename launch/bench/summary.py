"""Statistics from records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .record import Record

PERCENTILES = (50, 90, 99)


class Targets(NamedTuple):
    """The latency targets of a good answer; None: no target."""

    ttft_ms: float | None
    itl_ms: float | None  # for the mean time per output token, as in vLLM's goodput

    @property
    def any_given(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None

    def met_by(self, record: Record) -> bool:
        return (
            record.ok
            and (self.ttft_ms is None or (record.ttft_ms is not None and record.ttft_ms <= self.ttft_ms))
            and (self.itl_ms is None or record.tpot_ms is None or record.tpot_ms <= self.itl_ms)
        )


def summarize(records: Sequence[Record], duration_s: float, targets: Targets) -> dict[str, Any]:
    """Plain figures. Latencies and token counts are those of successful answers, rates are over the whole duration."""
    answered = [record for record in records if record.ok]
    num_output_tokens = sum(record.num_output_tokens for record in answered)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in answered)
    return {
        "duration_s": duration_s,
        "num_requests": len(records),
        "num_answered": len(answered),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "first_message": next((record.message for record in records if record.error is not None), None),
        "num_prompt_tokens": num_prompt_tokens,
        "num_cached_tokens": sum(record.num_cached_tokens for record in answered),
        "num_output_tokens": num_output_tokens,
        "requests_per_s": len(answered) / duration_s,
        "output_tokens_per_s": num_output_tokens / duration_s,
        "total_tokens_per_s": (num_output_tokens + num_prompt_tokens) / duration_s,
        "goodput": _goodput(records, duration_s, targets) if targets.any_given else None,
        "ttft_ms": _spread(record.ttft_ms for record in answered),
        "itl_ms": _spread(gap for record in answered for gap in record.gaps_ms),
        "tpot_ms": _spread(record.tpot_ms for record in answered),
        "tokens_per_second": _spread(record.tokens_per_second for record in answered),
        "e2e_ms": _spread(record.e2e_ms for record in answered),
        # How late the client itself was in sending requests that were due; if this is not small, it measured itself.
        "client_lag_ms": _spread((record.sent_s - record.scheduled_s) * 1e3 for record in answered),
        "stages_ms": _mean_stages(answered),
    }


def _goodput(records: Sequence[Record], duration_s: float, targets: Targets) -> dict[str, Any]:
    num_good = sum(targets.met_by(record) for record in records)
    return {
        "ttft_target_ms": targets.ttft_ms,
        "itl_target_ms": targets.itl_ms,
        "num_good": num_good,
        "share": num_good / len(records),
        "requests_per_s": num_good / duration_s,
    }


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    percentiles = np.percentile(known, PERCENTILES).tolist()
    named = {f"p{percent}": value for percent, value in zip(PERCENTILES, percentiles, strict=True)}
    return {"mean": float(np.mean(known)), **named, "max": max(known)}


def _mean_stages(records: Sequence[Record]) -> dict[str, float] | None:
    ledgers = [record.stages_ms for record in records if record.stages_ms is not None]
    if not ledgers:
        return None
    return {stage: sum(ledger[stage] for ledger in ledgers) / len(ledgers) for stage in ledgers[0]}
