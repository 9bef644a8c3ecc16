"""What every worker process does before, around and after its own work."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..protocol.board import KEEP, STOP, Board, WorkerPage
from ..protocol.channels import Inbox, Links, Router, Transport
from ..protocol.config import PipelineConfig
from ..protocol.curve import CurveServer
from ..protocol.intent import Intent
from ..protocol.journal.layout import Journal
from ..protocol.lifeline import end_only_with, raise_file_limit, show_stacks_at_the_end
from ..protocol.model_card import ModelCard
from ..protocol.proc_stat import START_TIME, stat_field
from ..protocol.run_dir import board_path, journal_path, read_config
from ..protocol.service import curve_server

logger = logging.getLogger(__name__)

T = TypeVar("T")

RECEIVING_S = 0.05  # per turn, plus one frame: a client that sends a lot must not hold up the others
WAIT_FOR_MODEL_S = 0.02
TICK_S = 0.25  # how often an idle worker checks the journal and shows progress
# If a check comes this long after the last one, or a wait ends this late, the process was stopped, as in a paused
# container.
STOPPED_S = 2 * TICK_S
FLUSH_S = 60.0  # how long one flush of the disk may take before the waiting worker counts as hung


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Everything a worker body is given."""

    role: str
    epoch: int
    run_dir: Path
    config: PipelineConfig
    board: Board
    journal: Journal
    transport: Transport = field(default_factory=Transport)
    stop_files: tuple[int, ...] = ()  # become and stay readable once the board tells this worker to exit

    def links(self, *peers: str) -> Links:
        """This worker's inbox, and its channels to ``peers``."""
        return Links(self.run_dir, self.role, epoch=self.epoch, peers=peers, transport=self.transport)

    def curve_server(self, endpoint: str | None) -> CurveServer | None:
        """How a client socket accepts connections from the network; None if no keys are configured."""
        return curve_server(self.run_dir, self.config.service, endpoint)

    @property
    def page(self) -> WorkerPage:
        return self.board.worker(self.role)

    def set_phase(self, phase: str) -> None:
        if phase == "ready":
            # Whatever loading created will stay. Scanning torch's and transformers' objects in every full collection
            # delays a step by some 90 ms.
            gc.freeze()
        self.page.set_phase(self.epoch, phase)

    def flush_journal(self) -> None:
        """Wait for the disk, with increased patience: if this worker were killed, the next one would wait just as long.

        Raises:
            JournalError: the disk failed.
        """
        patience_ns = self.page.patience_ns
        self.page.set_patience(max(patience_ns, int(FLUSH_S * 1e9)))
        self.page.progress()
        try:
            self.journal.flush()
        finally:
            self.page.progress()
            self.page.set_patience(patience_ns)

    @property
    def stopping(self) -> bool:
        return self.board.mode in (STOP, KEEP)

    @property
    def intent(self) -> Intent:
        return self.board.intent(self.role)


def wait_for_model(context: WorkerContext, load: Callable[[Path], T | None]) -> tuple[ModelCard, T] | None:
    """The model card, and what ``load`` makes of the tokenizer in the run directory, once both are there; None if the
    worker is told to stop first.
    """
    tokenizer: T | None = None  # loaded once: a large one takes a second, and the weights may take minutes
    while not context.stopping:
        tokenizer = load(context.run_dir) if tokenizer is None else tokenizer
        if tokenizer is not None and (card := ModelCard.read(context.run_dir)) is not None:
            return card, tokenizer
        context.page.progress()
        time.sleep(WAIT_FOR_MODEL_S)
    return None


def received_frames(router: Router, *, max_frames: int) -> Iterator[tuple[bytes, bytes]]:
    """``(peer, frame)`` of received messages, up to the limits of one turn."""
    until = time.monotonic() + RECEIVING_S
    for _ in range(max_frames):
        if (received := router.recv()) is None:
            return
        yield received
        if time.monotonic() > until:
            return


class StatsPublisher:
    """Publishes statistics on the board: soon after a change, but not after every change."""

    INTERVAL_S = TICK_S  # shorter, and a worker would wake for this alone, between tokens that are 20 ms apart

    def __init__(self, page: WorkerPage, collect: Callable[[], dict[str, Any]]) -> None:
        self._page = page
        self._collect = collect
        self._next = 0.0
        self.changed = True

    def publish_if_due(self) -> float:
        """Returns the seconds until the next call is due."""
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


class Ticks:
    """When a worker reads the journal again: every TICK_S, and at once if messages were lost, whose content it has."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._next = 0.0

    @property
    def wait_s(self) -> float:
        return max(0.0, self._next - time.monotonic())

    def begin_if_due(self) -> bool:
        """Whether it is time; the next time is then TICK_S later."""
        now = time.monotonic()
        if now < self._next and not self._inbox.missed:
            return False
        self._inbox.missed = False
        self._next = now + TICK_S
        return True

    def hasten(self) -> None:
        """It is time."""
        self._next = 0.0


def main(role: str, body: Callable[[WorkerContext], None]) -> None:
    """Run a worker until it is told to stop, and exit the process; the exit code is 0 only in that case."""
    parser = argparse.ArgumentParser(description=f"The {role} worker of a Triptych pipeline; started by its driver.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--epoch", type=int, required=True, help="number of this start")
    parser.add_argument("--parent", type=int, required=True, help="process id of the driver")
    arguments = parser.parse_args()
    end_only_with(arguments.parent)
    show_stacks_at_the_end()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the host ignores it, our children's exit codes would be lost
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s"
    )
    raise_file_limit()
    context = open_context(role, arguments.epoch, arguments.run_dir, stop_files=stop_files())
    context.page.set_phase(context.epoch, "starting", since=process_start())
    context.page.set_patience(0)  # the previous process may have died during a flush
    try:
        body(context)
    except BaseException:
        logger.exception("worker %s failed", role)
        sys.stderr.flush()
        context.set_phase("failed")  # last: whoever sees it then reads the log
        os._exit(1)  # library threads must not keep a broken worker alive
    context.set_phase("stopped")
    logging.shutdown()
    os._exit(0)  # nothing is left to do, and torch alone takes long to shut down


def open_context(role: str, epoch: int, run_dir: Path, *, stop_files: tuple[int, ...]) -> WorkerContext:
    config = read_config(run_dir)
    journal = Journal.open(journal_path(run_dir, config.service))
    return WorkerContext(role, epoch, run_dir, config, Board(board_path(run_dir)), journal, stop_files=stop_files)


def stop_files() -> tuple[int, ...]:
    """The pipe that the driver passes as standard input, moved out of reach of child processes."""
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return ()  # started manually
    file = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return (file,)


def process_start() -> float:
    """When this process started, before Python and its imports, as time.monotonic(), accurate to 10 ms."""
    since_boot = int(stat_field("self", START_TIME)) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
