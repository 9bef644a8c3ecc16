"""Verdicts and figures as tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..terminal.report import duration, facts_table, number
from .verify import Verdict


def show_verdict(path: Path, verdict: Verdict) -> None:
    from rich.console import Console

    facts: dict[str, Any] = {
        "steps": verdict.num_steps,
        "requests": verdict.num_requests,
        "starts of execute": verdict.num_lives,
        "preemptions": verdict.num_preemptions,
        "aborted": verdict.num_aborted,
        "cached tokens": verdict.num_cached_tokens,
    }
    if (found := verdict.difference) is None:
        facts["verdict"] = "every step is planned as recorded"
    else:
        facts["verdict"] = f"line {found.line}, step {found.step}: {found.field} differs"
        facts["recorded"], facts["replayed"] = str(found.recorded), str(found.replayed)
    Console().print(facts_table(path.name, facts))


def show_report(settings: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """The settings, the rates, and the times."""
    from rich.console import Console

    console = Console()
    cost = settings["cost_ms"]
    facts = {
        **{name: value for name, value in settings.items() if name != "cost_ms"},
        "a step costs": (
            f"{cost['step']:.3g} ms, {1e3 * cost['prefill_token']:.3g} us per prompt token,"
            f" {1e3 * cost['decode']:.3g} us per decode, {1e6 * cost['read']:.3g} ns per read"
        ),
    }
    console.print(facts_table("Simulated", facts))
    console.print(_rates(report))
    console.print(_times(report))


def _rates(report: Mapping[str, Any]) -> Any:
    ends = ", ".join(f"{report[name]} {name}" for name in ("finished", "expired", "refused") if report[name])
    facts = {
        "requests": f"{report['requests']}: {ends or 'none ended'}",
        "in": f"{report['duration_s']:.1f} s, {report['steps']} steps",
        "requests per second": number(report["requests_per_second"]),
        "output tokens per second": number(report["output_tokens_per_second"]),
        "prompt tokens per second": number(report["prompt_tokens_per_second"]),
        "decodes per step": report["decodes_per_step"],
        "tokens per step": report["tokens_per_step"],
        "busy": ", ".join(f"{100 * share:.0f} %" for share in report["busy"].values()),
        "cache hit rate": f"{100 * report['cache_hit_rate']:.1f} %",
        "preemptions": f"{report['preemptions']}, {report['swaps']} of them swapped",
        "most pages held": report["pages_held_most"],
    }
    if len(report["requests_of"]) > 1:
        facts["requests of each"] = ", ".join(map(str, report["requests_of"].values()))
    return facts_table("Throughput", facts)


def _times(report: Mapping[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("Time", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="left" if column == "Time" else "right", no_wrap=True)
    names = {
        "until the first step": "wait_ms", "until the first token": "ttft_ms",
        "from token to token": "inter_token_ms", "until the last token": "latency_ms",
    }  # fmt: skip
    for shown, name in names.items():
        table.add_row(shown, *(duration(value) for value in report[name].values()))
    return table
