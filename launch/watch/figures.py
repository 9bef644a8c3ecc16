"""The figures of the three panels, in the order in which they matter."""

from __future__ import annotations

from typing import NamedTuple

from ..report import number
from .watched import Stage, Watched


class Figure(NamedTuple):
    """A line of a panel."""

    name: str  # stable, for whoever draws something beside it
    label: str
    value: str
    gauge: tuple[int, int] | None = None  # how much of a whole it is
    tone: str = ""  # "bad", "warning", "strong", or nothing special


def prepare_figures(stage: Stage, watched: Watched) -> list[Figure]:
    rejected = sum(stage.get("rejected", {}).values())
    waiting, limit = stage.get("waiting", 0), watched.limits["max_queue"]
    live, max_live = stage.get("live", 0), stage.get("max_live", 0)
    return [
        Figure("waiting", "waiting", f"{waiting}/{limit}", (waiting, limit)),
        Figure("credits", "credits in use", f"{live}/{max_live}", (live, max_live)),
        Figure("accepted", "accepted", number(stage.get("accepted", 0))),
        Figure("refused", "refused", number(rejected), tone="bad" if rejected else ""),
        Figure("prompt_tokens", "prompt tokens", number(stage.get("prompt_tokens", 0))),
        Figure("pending", "at the tokenizer", f"{number(stage.get('pending_bytes', 0))}B"),
        Figure("records", "journal records", f"{stage.get('records_used', 0)}"),
    ]


def execute_figures(stage: Stage, watched: Watched) -> list[Figure]:
    rows, max_rows = stage.get("decoding", 0), watched.card["max_num_seqs"]
    held = stage.get("pages_held", 0)
    step = f"{stage.get('step_ms_median', 0.0):.1f}ms ≤{stage.get('step_ms_max', 0.0):.0f}"
    return [
        Figure("decoding", "decoding", f"{rows}/{max_rows}", (rows, max_rows)),
        Figure("prefill", "prefill · ready", f"{stage.get('prefilling', 0)} · {stage.get('ready', 0)}"),
        Figure("pages", "pages held", f"{held}/{stage.get('pages', 0)}"),
        Figure("steps", f"step {watched.steps_per_s:.0f}/s", step),
        Figure("hits", f"hits {stage.get('cache_hit_rate', 0.0):.0%}", _elsewhere(stage)),
    ]


def summarize_figures(stage: Stage, watched: Watched) -> list[Figure]:
    finished = stage.get("finished", {})
    bad = stage.get("bad_frames", 0) + stage.get("forgotten_unread", 0)
    return [
        Figure("rate", "tokens/s", number(stage.get("tokens_per_second", 0.0)), tone="strong"),
        Figure("live", "answers live", f"{stage.get('live', 0)}"),
        Figure("followed", "followed", f"{stage.get('followed', 0)}"),
        Figure("unread", "ended, unread", f"{stage.get('unread', 0)}"),
        Figure("tokens", "tokens", number(stage.get("tokens", 0))),
        Figure("finished", "finished", number(finished.get("stop", 0) + finished.get("length", 0))),
        Figure("failed", "aborted · failed", f"{finished.get('abort', 0)} · {finished.get('error', 0)}"),
        Figure("bad", "unread · bad frames", number(bad), tone="warning" if bad else ""),
    ]


FIGURES = {"prepare": prepare_figures, "execute": execute_figures, "summarize": summarize_figures}


def _elsewhere(stage: Stage) -> str:
    """Pages on the host where there are any, else how often requests lost theirs."""
    host = stage.get("host_pages", 0)
    used = host - stage.get("host_pages_free", 0)
    return f"host {used}/{host}" if host else f"preempted {stage.get('preemptions', 0)}"
