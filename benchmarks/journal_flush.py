"""What does it cost to have a request, or a step's tokens, on disk and not only in memory?

The journal is in the current directory, or in ``TRIPTYCH_BENCH_DIR``: that disk is measured. Prints one JSON line.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.records import make_record
from benchmarks.report import environment, publish, spread, time_us
from triptych.protocol.journal.layout import Journal
from triptych.protocol.journal.requests import AcceptTimes, RequestWriter, read_request
from triptych.protocol.journal.tokens import TokenWriter

ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 256, 256, 1024
REPEATS, WARM_UP = 100, 10
TIMES = AcceptTimes(1, 2, 3, 4)


def main() -> None:
    folder = os.environ.get("TRIPTYCH_BENCH_DIR") or "."
    with tempfile.TemporaryDirectory(dir=folder) as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        results = {"disk": measure(Path(disk)), "memory": measure(Path(memory))}
    config = {"rows": ROWS, "prompt_tokens": PROMPT_TOKENS, "file_system": file_system(Path(folder))}
    publish({"what": "journal_flush", **environment("numpy"), "config": config, "microseconds": results})


def measure(folder: Path) -> dict[str, dict[str, float]]:
    journal = Journal.create(folder / "journal", num_records=1024, arena_bytes=64 << 20)
    requests, tokens = RequestWriter(journal), TokenWriter(journal)
    slots = np.array([requests.accept(make_record([1] * PROMPT_TOKENS, OUTPUT_TOKENS), TIMES)[0] for _ in range(ROWS)])
    for slot in slots:
        view = read_request(journal, int(slot))
        assert view is not None
        tokens.adopt(view)
    ids = np.arange(ROWS, dtype=np.int32)
    count = iter(range(OUTPUT_TOKENS))

    def step() -> None:
        index = next(count)
        tokens.publish(slots, np.full(ROWS, index), ids, 1_000_000 * index)

    def step_and_flush() -> None:
        step()
        journal.flush()

    def accept_and_flush() -> None:
        requests.accept(make_record([1] * PROMPT_TOKENS, OUTPUT_TOKENS), TIMES)
        journal.flush()

    result = {
        f"a step of {ROWS} rows": median(step),
        f"a step of {ROWS} rows, flushed": median(step_and_flush),
        "an accept, flushed": median(accept_and_flush),
        "a flush of nothing": median(journal.flush),
    }
    journal.close()
    return result


def file_system(folder: Path) -> str:
    """The type of a folder's file system."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, name, *_ = line.split()
        if str(folder.resolve()).startswith(point) and len(point) > len(best):
            best, kind = point, name
    return kind


def median(run: Callable[[], object]) -> dict[str, float]:
    return spread(time_us(run, warm_up=WARM_UP, repeats=REPEATS))


if __name__ == "__main__":
    main()
