"""What every worker process does before, around and after its own work."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..protocol.board import STOP, Board, WorkerPage
from ..protocol.config import PipelineConfig
from ..protocol.journal.layout import Journal
from ..protocol.lifeline import die_with
from ..protocol.run_dir import CONFIG_FILE, board_path, journal_path

logger = logging.getLogger(__name__)

TICK_S = 0.25  # an idle worker looks at the journal and shows that it lives so often


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker body gets."""

    role: str
    epoch: int
    run_dir: Path
    config: PipelineConfig
    board: Board
    journal: Journal

    @property
    def page(self) -> WorkerPage:
        return self.board.worker(self.role)

    def set_phase(self, phase: str) -> None:
        self.page.set_phase(self.epoch, phase)

    @property
    def stopping(self) -> bool:
        return self.board.mode == STOP


class StatsPublisher:
    """Puts statistics on the board: soon after something changed, not after every change."""

    INTERVAL_S = 0.05

    def __init__(self, page: WorkerPage, collect: Callable[[], dict[str, Any]]) -> None:
        self._page = page
        self._collect = collect
        self._next = 0.0
        self.changed = True

    def publish_if_due(self) -> float:
        """Seconds until this should be called again."""
        self._page.progress()
        if not self.changed:
            return TICK_S
        now = time.monotonic()
        if now < self._next:
            return self._next - now
        self.changed = False
        self._next = now + self.INTERVAL_S
        self._page.publish({**self._collect(), "startup_s": self._page.phase_s})
        return TICK_S


def main(role: str, body: Callable[[WorkerContext], None]) -> None:
    """Run a worker until it is told to stop. The exit code is 0 only then."""
    parser = argparse.ArgumentParser(description=f"The {role} worker of a Triptych pipeline; started by its driver.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of the driver")
    arguments = parser.parse_args()
    die_with(arguments.parent)
    # Ctrl-C and a service manager's SIGTERM reach the whole group; the driver alone decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s"
    )
    context = open_context(role, arguments.epoch, arguments.run_dir)
    context.page.set_phase(context.epoch, "starting", since=process_start())
    try:
        body(context)
    except BaseException:
        context.set_phase("failed")
        logger.exception("worker %s failed", role)
        sys.stderr.flush()
        os._exit(1)  # threads of a library must not keep a broken worker alive
    context.set_phase("stopped")


def open_context(role: str, epoch: int, run_dir: Path) -> WorkerContext:
    config = PipelineConfig.from_json((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    journal = Journal.open(journal_path(run_dir, config.service))
    return WorkerContext(role, epoch, run_dir, config, Board(board_path(run_dir)), journal)


def process_start() -> float:
    """When this process began, in seconds of time.monotonic, a hundredth exact: before Python and its imports."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # the name before it may hold spaces
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22, starttime
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
