"""What ``make demo`` shows fits on a terminal of 80 columns."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from triptych.launch.demo.scenes import QUESTIONS, Demo
from triptych.launch.terminal.demo_view import WIDTH, block


@pytest.mark.parametrize(("width", "longest"), [(80, 80), (200, WIDTH)])
def test_block_of_text_fits_on_the_terminal(width: int, longest: int) -> None:
    lines = block("seven77 " * 50, Console(width=width, file=StringIO())).splitlines()
    assert longest - 8 <= max(map(len, lines)) <= longest


def test_no_figure_of_the_ledgers_is_cut_off() -> None:
    stages = {"queue": 199.0, "detokenize": 22.75, "decode": 99.9}
    ledger = {"stages_ms": stages, "wall_ms": sum(stages.values()), "ttft_ms": 1234.5, "tps": 1234.5}
    console = Console(width=80, file=StringIO())
    driver: Any = None  # not asked
    demo = Demo(driver, console)
    answers: Any = dict.fromkeys(QUESTIONS, SimpleNamespace(ledger=ledger))
    demo._answers = answers
    demo.account()
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "…" not in shown
    assert [shown.count(figure) for figure in ("199", "22.8", "1234")] == [8, 8, 16]
