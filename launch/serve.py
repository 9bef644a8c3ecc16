"""``triptych serve``: the pipeline for clients in other processes, until a signal ends it."""

from __future__ import annotations

import logging
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..driver.driver import Driver, num_unanswered
from ..protocol.config import PipelineConfig
from ..protocol.errors import RequestTimeout, TriptychError
from ..protocol.journal.layout import Journal
from ..protocol.run_dir import journal_path
from .report import model_line, statistics_line
from .signals import signals_ignored
from .startup import start

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

STATISTICS_S = 1.0


def serve(config: PipelineConfig, *, run_dir: Path | None, drain_timeout: float, console: Console) -> int:
    """Serve until SIGINT or SIGTERM, then drain; a second signal stops at once. The exit code of a clean stop is 0.

    Raises:
        ConfigError: the run directory is in use or unsafe.
        WorkerDied: a worker failed to start, or the driver gave up restarting it.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C
    driver = Driver(run_dir=run_dir, config=config)
    try:
        startup = start(driver, console, say=logger.info)
    except KeyboardInterrupt:
        return 0  # the driver has stopped what it had started
    try:
        for line in startup.account(driver.pids):
            logger.info("%s", line)
        logger.info("model %s", model_line(driver.info()["model"]))
        logger.info("ready: triptych generate --connect %s", driver.run_dir)
        _report_for_ever(driver)
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):  # the second signal
            _drain(driver, drain_timeout)
    finally:
        with signals_ignored():
            _tell_what_is_cut(driver)
            driver.stop(mode="abort")
    return 0


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
