"""Counts of HTTP requests. Each gateway process keeps its own in a file of the run directory, and any process that is
asked for metrics adds them all up, so it does not matter which one is asked.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ....protocol.private_file import remove_if_possible, write_private

_NAME = "gateway-{}.json"
Key = tuple[str, str]  # route and status


def forget_counts(run_dir: Path) -> None:
    """Remove the counts of earlier gateways of this run directory, which may have had more processes."""
    for path in run_dir.glob(_NAME.format("*")):
        path.unlink(missing_ok=True)


class Counters:
    """The counters of one gateway process. They restart at 0 with it, as Prometheus expects."""

    def __init__(self, run_dir: Path, index: int) -> None:
        self._path = run_dir / _NAME.format(index)
        self._run_dir = run_dir
        self.index = index
        self.requests: Counter[Key] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by route
        self.num_open = 0  # requests in progress
        self.num_disconnects = 0
        self._written = ""

    def publish(self) -> None:
        """Write the counts if they changed; called at every heartbeat."""
        text = json.dumps({
            "requests": [[*key, count] for key, count in self.requests.items()],
            "seconds": dict(self.seconds),
            "open": self.num_open,
            "disconnects": self.num_disconnects,
        })  # fmt: skip
        if text != self._written:
            with suppress(OSError):  # the run directory is removed when the pipeline stops
                write_private(self._path, text)
                self._written = text

    def forget(self) -> None:
        """Remove the file: nothing is counted any more."""
        remove_if_possible(self._path)

    def of_all_processes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Index and counts of every gateway process; up to date for this one."""
        self.publish()
        for path in sorted(self._run_dir.glob(_NAME.format("*"))):
            with suppress(OSError, ValueError):
                yield path.stem.removeprefix("gateway-"), json.loads(path.read_text(encoding="utf-8"))
