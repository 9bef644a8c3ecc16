"""What does the journal cost? Writing and reading. Prints one JSON line; µs per call.

``publish`` is called in every step; the rest once per request, or once per tick.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.records import make_record
from benchmarks.report import environment, publish, spread, time_us
from triptych.driver.run_dir import SHARED_MEMORY
from triptych.protocol.journal.layout import DISPATCHED, Journal
from triptych.protocol.journal.releases import ReleaseWriter
from triptych.protocol.journal.requests import AcceptTimes, RequestWriter, read_request
from triptych.protocol.journal.tokens import TokenWriter, read_tokens

SEED, WARM_UP, REPEATS = 0, 5, 101
ROWS, RECORDS, ARENA_BYTES = 256, 4096, 64 << 20
PROMPT_TOKENS, OUTPUT_TOKENS = 1000, 1000
PUBLISH_CALLS = 9  # per repeat: as many as there is room for in the answers
TIMES = AcceptTimes(1_000_000_000, 1_000_100_000, 1_000_200_000, 1_000_300_000)


def main() -> None:
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=folder) as path:
        journal = Journal.create(Path(path) / "journal", num_records=RECORDS, arena_bytes=ARENA_BYTES)
        results = measure(journal)
    config = {"rows": ROWS, "records": RECORDS, "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    report = {"what": "journal", "unit": "us", **environment("numpy", "msgpack"), "config": config, "seed": SEED}
    publish({**report, "warm_up": WARM_UP, "results": results})


def measure(journal: Journal) -> dict[str, dict[str, float]]:
    requests, tokens, releases = RequestWriter(journal), TokenWriter(journal), ReleaseWriter(journal)
    views = []
    for _ in range(ROWS):
        slot, generation = requests.accept(make_record([1] * PROMPT_TOKENS, OUTPUT_TOKENS), TIMES)
        requests.dispatch(slot, generation, TIMES.accepted_ns)
        view = read_request(journal, slot)
        assert view is not None, "a record that was just written"
        tokens.adopt(view)
        views.append(view)
    slots = np.array([view.slot for view in views])
    ids = np.random.default_rng(SEED).integers(0, 1 << 15, (OUTPUT_TOKENS, ROWS)).astype(np.int32)
    steps = enumerate([np.full(ROWS, index) for index in range(OUTPUT_TOKENS)])

    def publish_step() -> None:
        index, indices = next(steps)
        tokens.publish(slots, indices, ids[index], TIMES.accepted_ns + index * 1_000_000)

    def accept_and_forget() -> None:
        slot, generation = requests.accept(make_record([1] * PROMPT_TOKENS, OUTPUT_TOKENS), TIMES)
        releases.forget(slot, generation)
        requests.recycle(slot, generation)

    def scan() -> None:
        slots = journal.slots_in_use()
        slots[(journal.states(slots) == DISPATCHED) & (journal.release_states(slots) == 0)]

    num_published = (WARM_UP + REPEATS) * PUBLISH_CALLS
    return {
        f"publish of {ROWS} rows": median(publish_step, calls=PUBLISH_CALLS),
        f"read_tokens of {num_published}": median(lambda: read_tokens(journal, views[0]), calls=50),
        "accept, forget and recycle": median(accept_and_forget, calls=50),
        "read_request": median(lambda: read_request(journal, 0), calls=50),
        f"scan of {RECORDS} records": median(scan, calls=50),
        f"restart of prepare with {ROWS} requests": median(lambda: RequestWriter(journal), calls=1),
    }


def median(run: Callable[[], object], *, calls: int) -> dict[str, float]:
    return spread(time_us(run, warm_up=WARM_UP, repeats=REPEATS, calls=calls))


if __name__ == "__main__":
    main()
