"""``triptych serve``: the pipeline for clients in other processes, until a signal ends it."""

from __future__ import annotations

import logging
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..driver.driver import Driver, num_unanswered
from ..protocol.config import PipelineConfig
from ..protocol.errors import RequestTimeout, TriptychError
from ..protocol.journal.layout import Journal
from ..protocol.run_dir import journal_path
from .gateway.config import GatewayConfig
from .gateway.processes import gateways
from .report import model_line, statistics_line
from .signals import signals_ignored
from .startup import start

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

STATISTICS_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What ``serve`` is asked for."""

    config: PipelineConfig
    gateway: GatewayConfig
    run_dir: Path | None
    drain_timeout: float  # seconds that accepted requests get at a stop
    log_level: str


def serve(task: Task, *, console: Console) -> int:
    """Serve until SIGINT or SIGTERM, then drain; a second signal stops at once. The exit code of a clean stop is 0.

    The gateways outlive the workers by a moment: whoever waits for an answer is told of its end by HTTP too.

    Raises:
        ConfigError: the run directory is in use or unsafe, or the HTTP address cannot be had.
        WorkerDied: a worker failed to start, or the driver gave up restarting it.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C
    driver = Driver(run_dir=task.run_dir, config=task.config)
    with ExitStack() as stack:
        try:
            driver.start(wait=False)
            url = stack.enter_context(gateways(task.gateway, driver.run_dir, log_level=task.log_level))
            _start(driver, console, url)
            _report_for_ever(driver)
        except KeyboardInterrupt:
            with suppress(KeyboardInterrupt, TriptychError):  # the second signal, or one that came before the start
                _drain(driver, task.drain_timeout)
        finally:
            stack.enter_context(signals_ignored())
            _tell_what_is_cut(driver)
            driver.stop(mode="abort")
    return 0


def _start(driver: Driver, console: Console, url: str | None) -> None:
    """Wait until the pipeline is ready, and say so."""
    startup = start(driver, console, say=logger.info)
    for line in startup.account(driver.pids):
        logger.info("%s", line)
    logger.info("model %s", model_line(driver.info()["model"]))
    if url is not None:
        logger.info("http: %s", url)
    logger.info("ready: triptych generate --connect %s", driver.run_dir)


def _report_for_ever(driver: Driver) -> None:
    """Log the statistics once a second as long as they change."""
    last, num_tokens, then = "", 0, time.monotonic()
    while True:
        time.sleep(STATISTICS_S)
        with suppress(RequestTimeout):  # a worker is being restarted; the next second tells
            stats = driver.client.stats(timeout=STATISTICS_S)
            now = time.monotonic()
            rate = max(0, stats["summarize"]["tokens"] - num_tokens) / (now - then)
            num_tokens, then = stats["summarize"]["tokens"], now
            if (line := statistics_line(stats, tokens_per_second=rate)) != last:
                logger.info("%s", line)
                last = line


def _drain(driver: Driver, timeout: float) -> None:
    logger.info(
        "draining for at most %g s, requests left: %d; the next signal stops at once", timeout, _num_left(driver)
    )
    driver.drain(timeout)


def _tell_what_is_cut(driver: Driver) -> None:
    with suppress(TriptychError):  # of a driver that gave up; that is told already
        if num_left := _num_left(driver):
            logger.warning("requests cut short: %d", num_left)


def _num_left(driver: Driver) -> int:
    journal = Journal.open(journal_path(driver.run_dir, driver.config.service))
    try:
        return num_unanswered(journal)
    finally:
        journal.close()
