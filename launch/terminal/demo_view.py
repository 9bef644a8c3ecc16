"""Displays answers that grow side by side: live rows on a terminal, otherwise one block per answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from textwrap import indent, wrap

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...driver.stream import Completion, Stream
from .report import duration, printable, say, summary_line

FRAMES_A_SECOND = 15
WIDTH = 100  # of a block of text, at most


@dataclass(slots=True)
class Row:
    """One question and its answer so far."""

    question: str
    stream: Stream
    asked_at: float
    text: str = ""
    tokens_per_second: float | None = None
    ttft_ms: float | None = None
    completion: Completion | None = None

    def follow(self) -> Row:
        """Read the stream to its end, in a separate thread."""
        for delta in self.stream:
            self.ttft_ms = self.ttft_ms or (time.monotonic() - self.asked_at) * 1000
            self.text += delta.text
            self.tokens_per_second = delta.tokens_per_second or self.tokens_per_second
        self.completion = self.stream.result()
        return self


def show_answers(rows: list[Row], console: Console) -> list[Completion]:
    """Show all answers as they arrive; return them in the order of the rows.

    Raises:
        RequestError: one of them failed.
    """
    with ThreadPoolExecutor(len(rows)) as threads:
        ended = (future.result() for future in as_completed([threads.submit(row.follow) for row in rows]))
        _show_live(rows, ended, console) if console.is_terminal else _show_blocks(ended, console)
    return [row.stream.result() for row in rows]


def block(text: str, console: Console) -> str:
    """The text as an indented block that fits on the terminal."""
    return indent("\n".join(wrap(printable(text), min(console.width, WIDTH) - 4)), "    ")


def _show_blocks(ended: Iterator[Row], console: Console) -> None:
    for row in ended:
        assert row.completion is not None, "a row that ended has a completion"
        say(console, f"{row.question}\n{block(row.text, console)}\n    ({summary_line(row.completion)})\n", "none")


def _show_live(rows: list[Row], ended: Iterator[Row], console: Console) -> None:
    with Live(get_renderable=lambda: _table(rows), console=console, refresh_per_second=FRAMES_A_SECOND):
        for _ in ended:
            pass
    console.print()


def _table(rows: list[Row]) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(ratio=1)
    for _ in ("first token", "rate"):
        table.add_column(justify="right", no_wrap=True)
    for row in rows:
        ttft = "" if row.ttft_ms is None else duration(row.ttft_ms)
        rate = "" if row.tokens_per_second is None else f"{row.tokens_per_second:.0f} tok/s"
        # Text objects, because a model may produce what rich would take for markup.
        table.add_row(row.question, Text(printable(row.text)), ttft, rate, style="green" if row.stream.done else "")
    return table
