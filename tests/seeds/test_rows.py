"""Every requirement has exactly one test function in this folder."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.seeds.rows import ROWS, row_of


def test_every_requirement_has_exactly_one_test_function_with_a_docstring() -> None:
    functions = [
        node
        for file in sorted(Path(__file__).parent.glob("test_*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and row_of(node.name)
    ]
    counts = Counter(row_of(function.name) for function in functions)
    assert {row: counts[row] for row in ROWS if counts[row] != 1} == {}
    assert [function.name for function in functions if not ast.get_docstring(function)] == []
