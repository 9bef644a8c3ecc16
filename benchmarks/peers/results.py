"""Collects runs: their medians, the shares of the machine's limits, a table and a plot."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cpu_models import num_weights, weight_bytes
from benchmarks.peers.contestants import OURS

TITLES = {"W1": "offline batch", "W2": "one stream", "W3": "one long prompt", "W5": "shared prefixes"}
LATENCIES = ("ttft_p50_ms", "itl_p50_ms", "itl_p99_ms")


def _weight_bytes(name: str) -> tuple[float, float]:
    return weight_bytes(name.split()[-1])


class Results:
    """All runs of one model."""

    def __init__(self, shape: dict[str, Any]) -> None:
        self._layers, self._head = num_weights(shape)
        self.limits: list[dict[str, float]] = []
        self.facts: dict[str, dict[str, Any]] = {}
        self.skipped: dict[str, str] = {}
        self.requests_per_s = 0.0  # of W4; 0 until it is known
        self._runs: dict[str, dict[str, list[dict[str, Any]]]] = {}

    def add(self, name: str, workload: str, run: dict[str, Any]) -> None:
        self._runs.setdefault(name, {}).setdefault(workload, []).append(run)

    def spent_s(self, name: str, workload: str) -> float:
        return sum(float(run.get("seconds", 0.0)) for run in self._runs.get(name, {}).get(workload, []))

    @property
    def names(self) -> list[str]:
        return list(self._runs)

    @property
    def workloads(self) -> list[str]:
        return sorted({workload for runs in self._runs.values() for workload in runs})

    def values(self, name: str, workload: str, key: str = "tokens_per_s") -> list[float]:
        return [run[key] for run in self._runs.get(name, {}).get(workload, []) if key in run]

    def median(self, name: str, workload: str, key: str = "tokens_per_s") -> float | None:
        values = self.values(name, workload, key)
        return median(values) if values else None

    def limit(self, key: str) -> float:
        return median(limits[key] for limits in self.limits)

    def share(self, name: str, workload: str) -> float | None:
        """Of the memory rate for W2, if a token reads every weight; of the matrix rate for W3.

        1 is the limit, except for our greedy tokens, which may read the head in eight bits (decision 0070).
        """
        rate, form = self.median(name, workload), name.split()[-1]
        if rate is None:
            return None
        if workload == "W2":
            of_layers, of_head = _weight_bytes(name)
            return rate * (self._layers * of_layers + self._head * of_head) / self.limit("read_rate")
        if workload == "W3":
            return rate * 2 * self._layers / self.limit("bf16_rate" if form == "bf16" else "int8_rate")
        return None

    def best_peer(self, form: str, workload: str) -> float | None:
        """Tokens per second of the best peer with at least as many bits per weight as ``form``."""
        rates = [
            rate
            for name in self.names
            if not name.startswith(OURS) and _weight_bytes(name) >= _weight_bytes(form)
            if (rate := self.median(name, workload)) is not None
        ]
        return max(rates, default=None)

    def lead(self, name: str, workload: str) -> float | None:
        """Our rate relative to the best peer's."""
        ours, peer = self.median(name, workload), self.best_peer(name.split()[-1], workload)
        return ours / peer if ours is not None and peer is not None else None

    def to_json(self) -> dict[str, Any]:
        engines = {
            name: {**self.facts[name], "runs": {w: [_rounded(run) for run in runs] for w, runs in by_workload.items()}}
            for name, by_workload in self._runs.items()
        }
        summary = {name: self._summary(name) for name in self.names}
        limits = {key: [round(limits[key] / 1e9, 1) for limits in self.limits] for key in self.limits[0]}
        return {
            "medians": summary,
            "w4_requests_per_s": self.requests_per_s,
            "limits_giga_per_s": limits,
            "skipped": self.skipped,
            "engines": engines,
        }

    def _summary(self, name: str) -> dict[str, Any]:
        summary: dict[str, Any] = {}
        for workload in self.workloads:
            keys = LATENCIES if workload == "W4" else ("tokens_per_s",)
            entry = {key: self.median(name, workload, key) for key in keys}
            entry |= {"of_limit": self.share(name, workload)}
            if name.startswith(OURS):
                entry |= {"of_best_peer": self.lead(name, workload)}
            summary[workload] = _rounded({key: value for key, value in entry.items() if value is not None})
        return summary


def _rounded(run: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in run.items()}


def table(model: str, results: Results) -> str:
    """Markdown: tokens per second, median (minimum to maximum), share of the limit, and ours over the best peer."""
    rates = [workload for workload in results.workloads if workload != "W4"]
    columns = rates + (["W4: TTFT p50 / ITL p50 / p99, ms"] if "W4" in results.workloads else [])
    lines = [f"\n### {model}", f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in results.names:
        cells = [_cell(results, name, workload) for workload in rates]
        if "W4" in results.workloads:
            latencies = [results.median(name, "W4", key) for key in LATENCIES]
            cells.append(" / ".join(f"{ms:.0f}" for ms in latencies if ms is not None))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    read, bf16, int8 = (results.limit(key) / 1e9 for key in ("read_rate", "bf16_rate", "int8_rate"))
    if results.requests_per_s:
        lines.append(f"\nW4: {results.requests_per_s} requests/s.")
    lines.append(f"\nLimits: {read:.0f} GB/s read, {bf16:.0f} GFLOP/s bf16, {int8:.0f} GOP/s int8 (torch).")
    return "\n".join([*lines, *(f"Without {name}: {why}." for name, why in results.skipped.items())])


def _cell(results: Results, name: str, workload: str) -> str:
    rate, values = results.median(name, workload), results.values(name, workload)
    if rate is None:
        return ""
    share, lead = results.share(name, workload), results.lead(name, workload) if name.startswith(OURS) else None
    notes = [] if share is None else [f"{share:.0%} of the limit"]
    notes += [] if lead is None else [f"{lead:.2f} x"]
    return f"{rate:.0f} ({min(values):.0f} to {max(values):.0f}){'; ' * bool(notes)}{', '.join(notes)}"


def draw(path: Path, model: str, results: Results) -> None:
    """Bars of the medians for each workload, with whiskers from minimum to maximum. Nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return
    workloads = [workload for workload in results.workloads if workload != "W4"]
    names = results.names
    figure = Figure(figsize=(2 + 2.6 * len(workloads), 0.8 + 0.35 * len(names)), layout="constrained")
    figure.suptitle(f"{model}: tokens per second")
    all_axes = figure.subplots(1, len(workloads), squeeze=False, sharey=True)[0]
    all_axes[0].set_yticks(range(len(names)), [name.replace("_cpp", ".cpp") for name in names])
    all_axes[0].invert_yaxis()
    for axes, workload in zip(all_axes, workloads, strict=True):
        for row, name in enumerate(names):
            if values := results.values(name, workload):
                axes.barh(row, median(values), color="tab:blue" if name.startswith(OURS) else "tab:gray")
                axes.plot([min(values), max(values)], [row, row], color="black")
                axes.annotate(
                    f"{median(values):,.0f}", (max(values), row), (4, 0), textcoords="offset points", va="center"
                )
        axes.set_title(f"{workload}: {TITLES[workload]}", fontsize="medium")
        axes.margins(x=0.25)
        axes.tick_params("y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
