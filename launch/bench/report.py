"""Prints the results of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..terminal.report import duration, number, say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_ROWS = (
    ("time to first token", "ttft_ms"),
    ("inter-token", "itl_ms"),
    ("time per output token", "tpot_ms"),
    ("end to end", "e2e_ms"),
    ("tokens/s of a request", "tokens_per_second"),
)
_COLUMNS = ("mean", "p50", "p90", "p99", "max")
LATE_MS = 10.0


def show(summary: Mapping[str, Any], console: Console, *, is_open: bool) -> None:
    """Print the tables; ``is_open``: arrivals did not wait for a turn, so lateness is the client's fault."""
    console.print(_throughput(summary))
    console.print(_latencies(summary))
    if summary["stages_ms"]:
        console.print(_stages(summary["stages_ms"]))
    if summary["errors"]:
        counts = ", ".join(f"{count} {code}" for code, count in summary["errors"].items())
        say(console, f"failed: {counts} (the first: {summary['first_message']})", "red")
    lag = summary["client_lag_ms"]
    if is_open and lag is not None and lag["p99"] > LATE_MS:
        say(console, f"this client was late: p99 {duration(lag['p99'])}; the figures are those of a busy client", "red")


def _throughput(summary: Mapping[str, Any]) -> Table:
    table = _grid()
    seconds = summary["duration_s"]
    table.add_row("answered", f"{summary['num_answered']} of {summary['num_requests']} in {seconds:.2f} s")
    table.add_row("requests/s", f"{summary['requests_per_s']:.2f}")
    table.add_row("output tokens/s", number(summary["output_tokens_per_s"]))
    table.add_row("all tokens/s", number(summary["total_tokens_per_s"]))
    cached = f", {summary['num_cached_tokens']} of the prompts' cached" if summary["num_cached_tokens"] else ""
    table.add_row("tokens", f"{summary['num_prompt_tokens']} in, {summary['num_output_tokens']} out{cached}")
    if good := summary["goodput"]:
        limits = {"first token": good["ttft_target_ms"], "per token": good["itl_target_ms"]}
        kept = ", ".join(f"{name} <= {limit:g} ms" for name, limit in limits.items() if limit is not None)
        table.add_row("goodput", f"{good['requests_per_s']:.2f} requests/s, {good['share']:.0%} of all ({kept})")
    return table


def _latencies(summary: Mapping[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for label, key in _ROWS:
        spread = summary[key] or dict.fromkeys(_COLUMNS)
        write: Callable[[Any], str] = duration if key.endswith("_ms") else number
        table.add_row(label, *("-" if spread[column] is None else write(spread[column]) for column in _COLUMNS))
    return table


def _stages(stages_ms: Mapping[str, float]) -> Table:
    """Where the time of a request went on average, by the pipeline's own ledger."""
    table, wall_ms = _grid(), sum(stages_ms.values()) or 1.0
    for stage, ms in stages_ms.items():
        if ms > 0:
            table.add_row(stage, f"{duration(ms):>8} {ms / wall_ms:5.0%} " + "█" * round(30 * ms / wall_ms))
    table.add_row("= wall", f"{duration(wall_ms):>8}", style="bold")
    return table


def _grid() -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=21)
    table.add_column()
    return table
