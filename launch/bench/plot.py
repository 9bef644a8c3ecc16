"""The plots of a benchmark: distributions and a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...protocol.errors import ConfigError
from .record import Record
from .summary import Targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_BINS = 60
SUFFIXES = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Check before the load whether its plots can be drawn.

    Raises:
        ConfigError: matplotlib is not installed, or the suffix is not that of an image format.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"plot is {str(path)!r}, it must end in {', '.join(SUFFIXES)}", param="plot")
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'triptych[bench]'", param="plot") from error


def draw(path: Path, records: Sequence[Record], *, title: str, targets: Targets) -> None:
    """Write four panels: first tokens and gaps as cumulative shares, a timeline of all requests, tokens per second."""
    from matplotlib.figure import Figure

    answered = [record for record in records if record.ok]
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    (first, gaps), (lines, rate) = figure.subplots(2, 2)
    _distribution(first, (r.ttft_ms for r in answered), "time to first token, ms", targets.ttft_ms)
    _distribution(gaps, (gap for r in answered for gap in r.gaps_ms), "inter-token, ms", targets.itl_ms)
    _time_lines(lines, records)
    _token_rate(rate, answered)
    figure.savefig(path, dpi=110)


def _distribution(axes: Axes, values: Iterable[float | None], label: str, target: float | None) -> None:
    known = np.sort([value for value in values if value is not None])
    if len(known):
        axes.plot(known, np.arange(1, len(known) + 1) / len(known))
        axes.set_xscale("log" if known[0] > 0 and known[-1] > 10 * known[0] else "linear")
    if target is not None:
        axes.axvline(target, color="tab:red", linestyle="--", label=f"target {target:g} ms")
        axes.legend()
    axes.set(xlabel=label, ylabel="share", ylim=(0, 1.02))
    axes.grid(alpha=0.3)


def _time_lines(axes: Axes, records: Sequence[Record]) -> None:
    """One line per request: up to its first token, and from there to its end; a cross where it failed."""
    for row, record in enumerate(records):
        if record.event_times_s and record.ended_s is not None:
            first_s = record.event_times_s[0]
            axes.hlines(row, record.scheduled_s, first_s, color="tab:orange")
            axes.hlines(row, first_s, record.ended_s, color="tab:blue")
        elif not record.ok:
            axes.plot(record.scheduled_s, row, "x", color="tab:red")
    handles: list[Any] = [axes.plot([], [], color=f"tab:{color}")[0] for color in ("orange", "blue")]
    axes.legend(handles, ["until the first token", "decoding"], loc="lower right")
    axes.set(xlabel="s", ylabel="request")


def _token_rate(axes: Axes, records: Sequence[Record]) -> None:
    times = [time for record in records for time in record.event_times_s]
    weights = [record.num_output_tokens / len(record.event_times_s) for record in records for _ in record.event_times_s]
    if times:
        counts, edges = np.histogram(times, bins=NUM_BINS, range=(0, max(times)), weights=weights)
        axes.stairs(counts / np.diff(edges), edges, fill=True, alpha=0.6)
    axes.set(xlabel="s", ylabel="output tokens/s")
    axes.grid(alpha=0.3)
