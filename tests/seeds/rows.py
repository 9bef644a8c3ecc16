"""The requirements tested in this folder, as ranges; each has one test function with its number in the name."""

from __future__ import annotations

RANGES = {
    "R-OD": 34,
    "N-OD": 17,
    "R-HF": 26,
    "N-HF": 7,
    "R-CF": 24,
    "N-CF": 10,
    "R-AA": 19,
    "N-AA": 16,
    "R-RL": 16,
    "N-RL": 10,
    "C": 30,
}
ROWS = tuple(f"{prefix}-{number}" for prefix, last in RANGES.items() for number in range(1, last + 1))


def row_of(function: str) -> str | None:
    """The requirement in the name of a test function: ``test_r_od_10_long_prompts...`` tests R-OD-10."""
    parts = function.removeprefix("test_").upper().split("_")
    for length in (3, 2):
        row = "-".join(parts[:length])
        if function.startswith("test_") and row in ROWS:
            return row
    return None
