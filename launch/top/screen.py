"""One frame: a head line, the three panels in the order in which a request passes them, and the list of requests."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...driver.standing import RequestLine
from ..terminal.report import number, printable
from ..watch.figures import FIGURES
from ..watch.watched import Stage
from .draw import Part, age, bar, progress, sparkline
from .state import State

PANEL_FRAME = 4  # columns of a panel's border and padding
PANEL_LINES, SHORT_PANEL_LINES = 9, 5  # the latter on terminals with fewer than SHORT_HEIGHT lines
SHORT_HEIGHT = 20
STATE_STYLES = {"waiting": "yellow", "queued": "yellow", "prefill": "magenta", "decode": "green", "ended": "dim"}
TONE_STYLES = {"": "", "bad": "red", "warning": "yellow", "strong": "bold"}
GAUGE_STYLES = {"waiting": "yellow", "decoding": "green"}
KEYS = "q quit · p pause · s order"


def frame(state: State, *, width: int, height: int | None, now_s: float) -> RenderableType:
    """The screen at this size; without a height, as long as needed."""
    if state.sample is None:
        return Text(f"waiting for the pipeline in {state.run_dir}")
    stats, inner = state.sample.stats, width // 3 - PANEL_FRAME
    num_lines = SHORT_PANEL_LINES if height is not None and height < SHORT_HEIGHT else PANEL_LINES
    panels = Table.grid(expand=True)
    for _ in range(3):
        panels.add_column(ratio=1)
    panels.add_row(*(_panel(role, stats[role], _lines(role, state, inner)[:num_lines]) for role in FIGURES))
    used = 2 + num_lines + 2  # head, panels with their borders
    rows = None if height is None else max(0, height - used - 2)  # the table's own head and foot
    return Group(_head(state, now_s), panels, _requests(state, width=width, rows=rows))


def _head(state: State, now_s: float) -> Text:
    card = state.card
    text = Text(no_wrap=True, overflow="ellipsis")
    if state.silent_since_s is not None:
        text.append(f"● no answer for {age(now_s - state.silent_since_s)}", "bold red")
    else:
        text.append(f"● {state.trouble or 'healthy'}", "bold yellow" if state.trouble else "bold green")
    if state.is_paused:
        text.append(" · paused", "bold yellow")
    restarts = f" · {state.num_restarts} restarts" if state.num_restarts else ""
    runs_on = f"{card['dtype']} on {card['device']} ({card['backend']})"
    text.append(f" · {card['model']} · {runs_on}{restarts} · {state.run_dir}")
    return text


def _panel(name: str, stage: Stage, lines: list[RenderableType]) -> Panel:
    is_ready = stage["phase"] == "ready"
    lives = f" · start {stage['epoch']}" if stage["epoch"] > 1 else ""
    return Panel(
        Group(*lines),
        title=f"[bold]{name}[/]{lives}",
        subtitle=None if is_ready else stage["phase"],
        border_style="cyan" if is_ready else "yellow",
    )


def _lines(role: str, state: State, width: int) -> list[RenderableType]:
    """The figures of a stage, each followed by its bar or curve."""
    assert state.sample is not None, "a frame has a sample"
    stage = state.sample.stats[role]
    lines: list[RenderableType] = []
    for figure in FIGURES[role](stage, state):
        mark = "█ " if figure.name == "pages" else ""
        fits = len(mark + figure.label) + 1 + len(figure.value) <= width
        label, value = (figure.label, figure.value) if fits or figure.short is None else figure.short
        lines.append(_pair(mark + label, value, width, TONE_STYLES[figure.tone]))
        if figure.gauge is not None:
            lines.append(progress(*figure.gauge, width, GAUGE_STYLES.get(figure.name, "cyan")))
        match figure.name:
            case "pages":
                lines += _pages(stage, width)
            case "steps":
                lines.append(Text(sparkline(state.step_times_ms, width), "magenta"))
            case "rate":
                lines.append(Text(sparkline(state.token_rates, width), "green"))
    return lines


def _pages(stage: Stage, width: int) -> list[Text]:
    held, limbo, cached = (stage.get(f"pages_{name}", 0) for name in ("held", "limbo", "cached"))
    parts = [
        Part(held, "█", "blue"),
        Part(limbo, "▓", "yellow"),
        Part(cached, "▒", "green"),
        Part(stage.get("pages_free", 0), "░", "dim"),
    ]
    legend = f"▒ cached {number(cached)} ▓ limbo {number(limbo)}"
    if len(legend) > width:
        legend = f"▒ {number(cached)} ▓ {number(limbo)}"
    return [bar(parts, width), Text(legend[:width], "dim", no_wrap=True)]


def _pair(label: str, value: str, width: int, style: str = "") -> Text:
    """A label on the left and its value on the right; the value takes precedence if there is not enough room."""
    room = max(0, width - len(value) - 1)
    text = Text(label[:room].ljust(room + 1)[: max(0, width - len(value))], "dim", no_wrap=True)
    return text.append(value, style or "default")


def _requests(state: State, *, width: int, rows: int | None) -> RenderableType:
    lines, sample = state.lines(), state.sample
    assert sample is not None, "a frame has a sample"
    shown = lines if rows is None else lines[:rows]
    is_wide = width >= 100
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name, justify in _columns(state, is_wide):
        # Of columns that may wrap, rich takes the room that is missing; their texts are cut instead.
        may_wrap = name in ("request", "")
        table.add_column(name, justify=justify, no_wrap=not may_wrap)  # type: ignore[arg-type]
    for line in shown:
        table.add_row(*_row(line, sample.requests.age_s(line), bar_width=max(8, width // 5), is_wide=is_wide))
    hidden = len(lines) - len(shown) + sample.requests.num_left_out
    foot = f"{len(lines)} requests" + (f", {hidden} more do not fit" if hidden else "")
    return Group(table, Text(f"{foot} · {KEYS}", "dim", no_wrap=True, overflow="ellipsis"))


def _columns(state: State, is_wide: bool) -> list[tuple[str, str]]:
    narrow = [("request", "left"), ("state", "left"), ("", "left"), ("tokens", "right"), ("prompt", "right")]
    marks = {"arrival": "age", "rate": "tok/s", "progress": ""}
    names = [*narrow, ("tok/s", "right"), ("age", "right")]
    more = [("cached", "right"), ("preempted", "right")] if is_wide else []
    return [(f"{name}*" if name and name == marks[state.order] else name, side) for name, side in names + more]


def _row(line: RequestLine, age_s: float, *, bar_width: int, is_wide: bool) -> list[Any]:
    style = STATE_STYLES.get(line.state, "")
    name = printable(line.request_id)  # chosen by a client: brackets in it must not be markup
    narrow = [
        Text(name if is_wide or len(name) <= 12 else name[:11] + "…", no_wrap=True, overflow="ellipsis"),
        Text(line.state, style),
        progress(line.num_tokens, line.max_tokens, bar_width, style),
        f"{line.num_tokens}/{line.max_tokens}",
        str(line.num_prompt_tokens),
        "-" if line.tokens_per_second is None else number(line.tokens_per_second),
        age(age_s),
    ]
    return [*narrow, str(line.num_cached_tokens), str(line.num_preemptions)] if is_wide else narrow
