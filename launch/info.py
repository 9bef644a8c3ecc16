"""``triptych info``: a model's card, and the limits and statistics of the pipeline that runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..protocol.config import PipelineConfig
from .pipeline import open_pipeline
from .report import facts_table

if TYPE_CHECKING:
    from rich.console import Console


def info(config: PipelineConfig, *, run_dir: Path | None, connect: Path | None, as_json: bool, console: Console) -> int:
    """Write what is known to standard output; statistics only of a pipeline that ran before."""
    with open_pipeline(config, run_dir=run_dir, connect=connect, console=console) as pipeline:
        facts: dict[str, Any] = pipeline.client.info()
        if connect is not None:
            facts["statistics"] = pipeline.client.stats()
    print(json.dumps(facts, indent=1)) if as_json else _print_tables(facts)
    return 0


def _print_tables(facts: Mapping[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    console.print(facts_table("Model", facts["model"]))
    console.print(facts_table("Limits", facts["limits"]))
    for stage, values in facts.get("statistics", {}).items():
        console.print(facts_table(stage, values))
