"""Prints the result of every requirement: ``python -m tests.seeds.table [pytest arguments]``.

Runs the tests of this folder. The exit code is 0 if every requirement has a test and no test failed.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.seeds.rows import ROWS, row_of

FOLDER = Path(__file__).parent


class Recorder:
    """Collects, for each requirement, the docstring of its test and the outcomes of all its cases."""

    def __init__(self) -> None:
        self.sentences: dict[str, str] = {}
        self.outcomes: defaultdict[str, set[str]] = defaultdict(set)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if isinstance(item, pytest.Function) and (row := row_of(item.originalname)):
                self.sentences[row] = " ".join((item.obj.__doc__ or "").split("\n\n")[0].split())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = row_of(report.nodeid.rpartition("::")[2].partition("[")[0])
        if row and (report.when == "call" or report.outcome != "passed"):
            reason = getattr(report, "wasxfail", "")
            state = "xfail" if reason and report.skipped else report.outcome
            self.outcomes[row].add(f"{state}: {reason}" if reason else state)

    def state(self, row: str) -> str:
        return "; ".join(sorted(self.outcomes[row])) or "MISSING"


def main(arguments: list[str]) -> int:
    recorder = Recorder()
    code = pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", str(FOLDER), *arguments], plugins=[recorder])
    counts: Counter[str] = Counter()
    for row in ROWS:
        state = recorder.state(row)
        counts[" and ".join(sorted({part.partition(":")[0] for part in state.split("; ")}))] += 1
        print(f"{row:<8} {state:<60} {recorder.sentences.get(row, '')}")
    print(f"{len(ROWS)} rows: " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
    missing = [row for row in ROWS if not recorder.outcomes[row]]
    if missing:
        print(f"no test for: {', '.join(missing)}", file=sys.stderr)
    return int(code) or int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
