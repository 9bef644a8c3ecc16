"""The figures of the three panels, in order of importance."""

from __future__ import annotations

from typing import NamedTuple

from ..terminal.report import number
from .watched import Stage, Watched


class Figure(NamedTuple):
    """One line of a panel."""

    name: str  # stable, for code that draws something beside it
    label: str
    value: str
    gauge: tuple[int, int] | None = None  # part and whole
    tone: str = ""  # "bad", "warning", "strong", or none
    short: tuple[str, str] | None = None  # label and value if there is no room for the others


def prepare_figures(stage: Stage, watched: Watched) -> list[Figure]:
    rejected = sum(stage.get("rejected", {}).values())
    waiting, limit = stage.get("waiting", 0), watched.limits["max_queue"]
    live, max_live = stage.get("live", 0), stage.get("max_live", 0)
    return [
        Figure("waiting", "waiting", f"{waiting}/{limit}", (waiting, limit)),
        _figure("credits", "credits in use", f"{live}/{max_live}", short="credits", gauge=(live, max_live)),
        Figure("accepted", "accepted", number(stage.get("accepted", 0))),
        Figure("refused", "refused", number(rejected), tone="bad" if rejected else ""),
        _figure("prompt_tokens", "prompt tokens", number(stage.get("prompt_tokens", 0)), short="tokens in"),
        _figure("pending", "at the tokenizer", f"{number(stage.get('pending_bytes', 0))}B", short="tokenizer"),
        _figure("records", "journal records", f"{stage.get('records_used', 0)}", short="records"),
    ]


def execute_figures(stage: Stage, watched: Watched) -> list[Figure]:
    rows, max_rows = stage.get("decoding", 0), watched.card["max_num_seqs"]
    held = stage.get("pages_held", 0)
    rate, median_ms, max_ms = watched.steps_per_s, stage.get("step_ms_median", 0.0), stage.get("step_ms_max", 0.0)
    steps = (f"step {rate:.0f}/s", f"{median_ms:.1f}ms ≤{max_ms:.0f}")
    hits = f"hits {stage.get('cache_hit_rate', 0.0):.0%}"
    return [
        Figure("decoding", "decoding", f"{rows}/{max_rows}", (rows, max_rows)),
        _figure(
            "prefill", "prefill · ready", f"{stage.get('prefilling', 0)} · {stage.get('ready', 0)}", short="pre·ready"
        ),
        _figure("pages", "pages held", f"{held}/{stage.get('pages', 0)}", short="held"),
        Figure("steps", *steps, short=(f"{rate:.0f}/s", f"{median_ms:.1f}≤{max_ms:.0f}ms")),
        Figure("hits", hits, _elsewhere(stage), short=(hits, _elsewhere(stage, is_short=True))),
    ]


def summarize_figures(stage: Stage, watched: Watched) -> list[Figure]:
    finished = stage.get("finished", {})
    num_aborted, num_failed = finished.get("abort", 0), finished.get("error", 0)
    unread, bad = stage.get("forgotten_unread", 0), stage.get("bad_frames", 0)
    tone = "warning" if unread or bad else ""
    return [
        Figure("rate", "tokens/s", number(stage.get("tokens_per_second", 0.0)), tone="strong"),
        Figure("live", "answers live", f"{stage.get('live', 0)}"),
        Figure("followed", "followed", f"{stage.get('followed', 0)}"),
        _figure("unread", "ended, unread", f"{stage.get('unread', 0)}", short="unread"),
        Figure("tokens", "tokens", number(stage.get("tokens", 0))),
        Figure("finished", "finished", number(sum(finished.values()) - num_aborted - num_failed)),
        _figure("failed", "aborted · failed", f"{num_aborted} · {num_failed}", short="abort·fail"),
        _figure("bad", "unread · bad frames", f"{unread} · {bad}", short="unread·bad", tone=tone),
    ]


FIGURES = {"prepare": prepare_figures, "execute": execute_figures, "summarize": summarize_figures}


def _figure(
    name: str, label: str, value: str, *, short: str, gauge: tuple[int, int] | None = None, tone: str = ""
) -> Figure:
    """A figure with a short form of its label only."""
    return Figure(name, label, value, gauge, tone, (short, value))


def _elsewhere(stage: Stage, *, is_short: bool = False) -> str:
    """Host pages in use if there are any, otherwise the number of preemptions."""
    host, num_preemptions = stage.get("host_pages", 0), stage.get("preemptions", 0)
    used = host - stage.get("host_pages_free", 0)
    if is_short:
        return f"h {used / host:.0%}" if host else f"lost {number(num_preemptions)}"
    return f"host {used}/{host}" if host else f"preempted {num_preemptions}"
