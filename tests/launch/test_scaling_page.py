"""docs/scaling.md: its commands are accepted, and its arithmetic is right."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from triptych.launch.cli import app
from triptych.launch.flags.aliases import canonical

PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
CALLS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("call", CALLS, ids=[call.split()[1] for call in CALLS])
def test_documented_command_is_accepted(call: str) -> None:
    _, verb, *arguments = shlex.split(call)
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    verbs[verb].make_context(verb, arguments, token_normalize_func=canonical)


@pytest.mark.parametrize(("layers", "num_ranks"), [(32, 1), (80, 4), (80, 8)])
def test_bytes_per_token_add_up(layers: int, num_ranks: int) -> None:
    in_all = 2 * layers * 8 * 128 * 2
    row = next(
        line for line in PAGE.splitlines() if line.startswith("| ") and f"{in_all // num_ranks:,} bytes |" in line
    )
    assert f"| {in_all:,} bytes | {num_ranks} |" in row
