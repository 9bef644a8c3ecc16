"""``triptych info``: describes a model, the pipeline that runs it, and the machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol.config import PipelineConfig
from .. import facts
from ..pipeline import Pipeline, open_pipeline
from ..terminal.report import facts_table

if TYPE_CHECKING:
    from rich.console import Console


def info(config: PipelineConfig, *, run_dir: Path | None, connect: Path | None, as_json: bool, console: Console) -> int:
    """Print everything known to standard output; statistics only for a pipeline that was already running."""
    with open_pipeline(config, run_dir=run_dir, connect=connect, console=console) as pipeline:
        found = _facts(pipeline, has_run=connect is not None)
    print(json.dumps(found, indent=1)) if as_json else _print_tables(found)
    return 0


def _facts(pipeline: Pipeline, *, has_run: bool) -> dict[str, Any]:
    stats = pipeline.client.stats()
    found: dict[str, Any] = {
        **pipeline.client.info(),
        "tokenizer": facts.tokenizer(pipeline.run_dir),
        "config": facts.config(pipeline.run_dir),
        "startup_s": {role: stage.pop("startup_s", {}) for role, stage in stats.items()},
        "versions": facts.versions(),
        "machine": facts.machine(),
    }
    return {**found, "statistics": stats} if has_run else found


def _print_tables(found: Mapping[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    for name, values in found.items():
        for title, part in values.items() if name in ("config", "statistics") else [(name, values)]:
            console.print(facts_table(_TITLES.get(title, title) if name != "config" else f"Config: {title}", part))


_TITLES = {
    "model": "Model",
    "limits": "Limits",
    "tokenizer": "Tokenizer",
    "startup_s": "Start-up, s",
    "versions": "Versions",
    "machine": "Machine",
}
