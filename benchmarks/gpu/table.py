"""The table of results and goals that a GPU check prints last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A line of the table: where its value is in the report, and its target."""

    what: str
    path: str
    goal: str = ""
    is_met: Callable[[Any], bool] | None = None


def at_least(limit: float) -> Callable[[Any], bool]:
    return lambda value: value >= limit


def at_most(limit: float) -> Callable[[Any], bool]:
    return lambda value: value <= limit


ROWS = [
    Row("copy bandwidth, bytes/s", "limits.copy_bytes_per_s"),
    Row("bf16 matrix product, flop/s", "limits.matmul_flop_per_s"),
    Row("tests on the device pass", "numerics.is_green", "yes", bool),
    Row("decode attention of copy, 64 x 2k, page 64", "attention.decode_page_64.default", ">= 0.80", at_least(0.8)),
    Row("  best way tried", "attention.decode_page_64.best_share"),
    Row("  which", "attention.decode_page_64.best"),
    Row("chunk attention of product, 2048", "attention.chunk_fresh.default", ">= 0.50", at_least(0.5)),
    Row("  best way tried", "attention.chunk_fresh.best_share"),
    Row("  of product, 1024", "attention.chunk_1024.default"),
    Row("  of product, 2048 in pages of 16", "attention.chunk_page_16.default"),
    Row("  16 tokens after 30,000, of copy", "attention.chunk_short.default"),
    Row("decode attention in int8, of copy", "attention.decode_int8.default", ">= 0.70", at_least(0.7)),
    Row("  best way tried", "attention.decode_int8.best_share"),
    Row("  which", "attention.decode_int8.best"),
    Row("  8B, tokens/s by attention alone", "attention.decode_int8_tokens_per_s"),
    Row("  the same in bfloat16", "attention.decode_tokens_per_s"),
    Row("  chunk attention of product, 2048", "attention.chunk_int8.default"),
    Row("  16 tokens after 30,000, of copy", "attention.chunk_short_int8.default"),
    Row("0.6B, 256 requests, output tokens/s", "small.throughput.output_tokens_per_s", ">= 20000", at_least(20_000)),
    Row("0.6B, batch 32: idle share of the GPU", "small.batch_32.idle_share", "< 0.02", at_most(0.02)),
    Row("  without overlap", "small.batch_32_serial.idle_share"),
    Row("0.6B, batch 32, output tokens/s", "small.batch_32.output_tokens_per_s"),
    Row("  without graphs", "small.batch_32_without_graphs.output_tokens_per_s"),
    Row("  steps that are graphs", "small.batch_32.graph_share", ">= 0.9", at_least(0.9)),
    Row("  drawn by temperature", "small.batch_32_drawn.output_tokens_per_s"),
    Row("  drawn by top-k 20 and top-p 0.95", "small.batch_32_top_p.output_tokens_per_s"),
    Row("  drawn, with logprobs", "small.batch_32_logprobs.output_tokens_per_s"),
    Row("  drawn, with penalties", "small.batch_32_penalties.output_tokens_per_s"),
    Row("  a step, ms", "small.step_times.decode_32.step_ms"),
    Row("  a step with a prompt of 64, ms", "small.step_times.decode_32_prefill_64.step_ms"),
    Row("  a step with a prompt of 512, ms", "small.step_times.decode_32_prefill_512.step_ms"),
    Row("overlapped tokens equal serial ones", "small.overlapped_equals_serial", "yes", bool),
    Row("8B, 256 x 1024/1024, output tokens/s", "large.throughput.output_tokens_per_s", ">= 8500", at_least(8500)),
    Row("  of the roofline of the run", "large.throughput.of_roofline", ">= 0.70", at_least(0.7)),
    Row("8B, batch 1, of the bandwidth", "large.batch_1.of_bandwidth", ">= 0.85", at_least(0.85)),
    Row("8B, prefill of the product", "large.prefill_of_matmul"),
    Row("8B, prefill of 512: launching, of the step", "large.step_times.prefill_512.launch_share"),
    Row("8B --deterministic, tokens/s", "deterministic.throughput.output_tokens_per_s", ">= 6000", at_least(6000)),
    Row("  alone equals together", "deterministic.equal_alone_and_together", "yes", bool),
    Row("0.6B over continuous batching (sdpa)", "ratios.small", ">= 3", at_least(3)),
    Row("8B over continuous batching (sdpa)", "ratios.large", ">= 3", at_least(3)),
    Row("three processes: throughput against one", "processes.batch_32.throughput_ratio", ">= 0.98", at_least(0.98)),
    Row("three processes: added inter-token, ms", "processes.batch_32.added_itl_ms", "<= 0.3", at_most(0.3)),
    Row("killed processes: all answers are the same", "recovery.is_exact", "yes", bool),
    Row("  execute killed: pause of a stream, s", "recovery.execute.pause_s"),
    Row("0.6B, a start after the first: imports, s", "loading.again.import_s"),
    Row("  the model, s", "loading.again.load_s"),
    Row("8B fp8, batch 1, tokens/s", "fp8.batch_1.tokens_per_s"),
    Row("8B int8 pages, 256 x 1024/1024, tokens/s", "int8_pages.throughput.output_tokens_per_s"),
    Row("LoRA adapters are what merged weights are", "adapters.equal_merged_weights", "yes", bool),
    Row("  --deterministic: alone equals together", "adapters.equal_alone_and_together", "yes", bool),
    Row("  all requests with one, of without", "adapters.one.of_none"),
    Row("  requests with eight, of without", "adapters.eight.of_none"),
    Row("8B of 128 experts, 256 x 1024/256, tokens/s", "experts.throughput.output_tokens_per_s"),
    Row("  of the roofline of the run", "experts.throughput.of_roofline"),
    Row("  batch 1, of the bandwidth", "experts.batch_1.of_bandwidth"),
    Row("  --deterministic: alone equals together", "experts.equal_alone_and_together", "yes", bool),
    Row("  of transformers' modules in graphs", "experts.of_transformers_modules", ">= 1", at_least(1)),
    Row("0.6B, proposals change no token", "speculation.equal_without", "yes", bool),
    Row("  a replay has the bits of its launches", "speculation.replay_equals_launches", "yes", bool),
    Row("  5 of one stream: the step, of a decode", "speculation.one.of_decode"),
    Row("  of 16 streams", "speculation.several.of_decode"),
    Row("8B: 5 of one stream: the step, of a decode", "speculation_large.one.of_decode", "<= 1.4", at_most(1.4)),
    Row("  of 16 streams", "speculation_large.several.of_decode", "<= 1.2", at_most(1.2)),
    Row("  7 of 8 right: speed of one stream", "speculation_large.one.speedup", ">= 2", at_least(2)),
    Row("  of 16 streams", "speculation_large.several.speedup", ">= 2", at_least(2)),
    Row("0.6B guesses for itself: no token changes", "draft_equal.one.is_equal", "yes", bool),
    Row("  of 16 streams", "draft_equal.several.is_equal", "yes", bool),
    Row("  right guesses of one stream", "draft_equal.one.accepted", ">= 0.7", at_least(0.7)),
    Row("0.6B for 8B: a guess, of a decode", "draft_speed.costs.guess", "<= 0.3", at_most(0.3)),
    Row("  8 of 10 right: speed of one stream", "draft_speed.streams_1.right_80%", ">= 1.4", at_least(1.4)),
    Row("  of 16 streams", "draft_speed.streams_16.right_80%", ">= 1.2", at_least(1.2)),
]  # fmt: skip


def table(report: dict[str, Any]) -> str:
    lines = [f"{'':44} {'value':>14} {'goal':>9}"]
    for row in ROWS:
        value = lookup(report, row.path)
        is_judged = isinstance(value, (int, float)) and row.is_met is not None
        verdict = "" if not is_judged else "  met" if row.is_met is not None and row.is_met(value) else "  MISSED"
        lines.append(f"{row.what:44} {shown(value, row, report):>14} {row.goal:>9}{verdict}")
    return "\n".join(lines)


def shown(value: Any, row: Row, report: dict[str, Any]) -> str:
    """The value, or a short reason why there is none; the complete error is below the table."""
    part = row.path.split(".")[0]
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if value is not None:
        return shorten(value)
    if part != "ratios" and part not in report.get("seconds", {}):
        return "not run"
    return (lookup(report, f"{part}.error") or "-").partition(":")[0]


def shorten(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def lookup(report: dict[str, Any], path: str) -> Any:
    value: Any = report
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
