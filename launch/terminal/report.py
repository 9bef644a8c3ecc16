"""Formats models, ledgers and statistics for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Control characters, which a terminal would obey rather than show; a model may write anything.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """The text with every control character except tabs and newlines replaced."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def say(console: Console, text: str, style: str = "dim", *, is_wrapped: bool = False) -> None:
    """Print a line verbatim: without markup, highlighting or line breaks that a pipe would see.

    ``is_wrapped``: on a terminal, break long lines between words.
    """
    soft_wrap = not (is_wrapped and console.is_terminal)
    console.print(text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=soft_wrap)


def number(value: float) -> str:
    """Three significant digits and a unit: 1.02 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:  # what is rounded to a thousand of the unit below
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def duration(ms: float | None) -> str:
    """Milliseconds in a readable form: 0.21 ms, 34 ms, 3.1 s."""
    if ms is None:
        return "-"
    if ms >= 1000:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2f} ms"


def model_line(card: Mapping[str, Any]) -> str:
    """The model card in one line, and more lines for what is missing: a head, and the reason why it is slow."""
    line = (
        f"{card['model']} · {card['model_type']}, {number(card['num_parameters'])} parameters, {card['dtype']} on"
        f" {card['device']} ({card['backend']}) · context {card['max_model_len']}"
        f" · {card['num_pages']} pages of {card['page_size']} tokens"
    )
    if not card.get("can_generate", True):
        line += "\nonly embeddings: the checkpoint has no head"
    return f"{line}\nslower than it could be: {card['why_slow']}" if card.get("why_slow") else line


def statistics_line(stats: Mapping[str, Any], *, tokens_per_second: float, prompt_tokens_per_second: float) -> str:
    """The current state of the pipeline in one line. The rates are of tokens generated, and of those of prompts."""
    execute = stats["execute"]
    used = execute["pages"] - execute["pages_free"] - execute["pages_cached"]
    return (
        f"{tokens_per_second:.0f} tok/s · {prompt_tokens_per_second:.0f} prompt tok/s · {stats['prepare']['live']} live"
        f" · {stats['prepare']['waiting']} waiting · {used}/{execute['pages']} pages"
    )


def summary_line(completion: Any) -> str:
    """The cost of one answer in one line."""
    ledger, usage = completion.ledger, completion.usage
    rate = f" · {ledger['tps']:.0f} tok/s" if ledger["tps"] is not None else ""
    return (
        f"{usage['completion_tokens']} tokens · first after {duration(ledger['ttft_ms'])}{rate}"
        f" · {completion.finish_reason}"
    )


def batch_line(what: str, *, num_ended: int, num_failed: int, num_tokens: int, elapsed_s: float) -> str:
    """The cost of many answers in one line."""
    return (
        f"{num_ended - num_failed} of {num_ended} {what} answered, {num_failed} failed · {num_tokens} tokens in"
        f" {elapsed_s:.1f} s · {number(num_tokens / elapsed_s)} tok/s"
    )


def ledger_table(ledgers: Mapping[str, Mapping[str, Any]]) -> Table:
    """One column per ledger: the milliseconds of every stage that took any time, and their sum."""
    table = _table("ms", *ledgers)
    for stage in next(iter(ledgers.values()))["stages_ms"]:
        times = [ledger["stages_ms"][stage] for ledger in ledgers.values()]
        if any(times):
            table.add_row(stage, *map(_short, times))
    table.add_section()
    table.add_row("= wall", *(_short(ledger["wall_ms"]) for ledger in ledgers.values()), style="bold")
    table.add_row("TTFT", *(_short(ledger["ttft_ms"]) for ledger in ledgers.values()))
    table.add_row("tok/s", *(_short(ledger["tps"]) for ledger in ledgers.values()))
    return table


def facts_table(title: str, facts: Mapping[str, Any]) -> Table:
    """Names and values, one per line."""
    from rich.text import Text

    table = _table(title, "")
    values = table.columns[1]
    values.justify, values.no_wrap, values.overflow = "left", False, "fold"  # some are sentences or long paths
    for name, value in facts.items():
        if name == "histograms":  # meant for /metrics
            continue
        table.add_row(name.replace("_", " "), Text(_cell(value)))  # a path or a token may look like markup
    return table


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left", no_wrap=True)
    return table


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(part)}" for name, part in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
