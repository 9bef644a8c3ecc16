"""``triptych serve``: the pipeline for clients in other processes, until a signal ends it."""

from __future__ import annotations

import logging
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..driver.driver import Driver
from ..protocol.config import PipelineConfig
from ..protocol.errors import TriptychError
from .report import model_line, statistics_line
from .signals import signals_ignored
from .startup import start

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

STATISTICS_S = 1.0


def serve(config: PipelineConfig, *, run_dir: Path | None, drain_timeout: float, console: Console) -> int:
    """Serve until SIGINT or SIGTERM, then drain; a second signal stops at once.

    Returns 0 if every accepted request was answered, 1 if some were cut short or left to the next driver, 3 if the
    driver had given up restarting a worker; then it stayed to answer how things stand until the signal.

    Raises:
        ConfigError: the run directory is in use or unsafe.
        WorkerDied: a worker failed to start.
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
            code = _stop(driver)
    return code


def _report_for_ever(driver: Driver) -> None:
    """Log the statistics once a second as long as they change."""
    last, num_tokens, then = "", 0, time.monotonic()
    while True:
        time.sleep(STATISTICS_S)
        with suppress(TriptychError):  # a worker is being restarted, or was given up
            stats = driver.client.stats(timeout=STATISTICS_S)
            now = time.monotonic()
            rate = max(0, stats["summarize"]["tokens"] - num_tokens) / (now - then)
            num_tokens, then = stats["summarize"]["tokens"], now
            if (line := statistics_line(stats, tokens_per_second=rate)) != last:
                logger.info("%s", line)
                last = line
        if (health := driver.health()).status == "failed" and last != health.reason:
            last = health.reason
            logger.error("%s; nothing is served any more, a signal ends this process with exit code 3", health.reason)


def _drain(driver: Driver, timeout: float) -> None:
    if driver.health().status == "failed":
        return  # everything has ended already
    logger.info(
        "draining for at most %g s, requests left: %d; the next signal stops at once", timeout, driver.num_unanswered
    )
    driver.drain(timeout)


def _stop(driver: Driver) -> int:
    """Stop at once; what is not answered is kept for the next driver, where there can be one. The exit code."""
    has_failed, num_left = driver.health().status == "failed", driver.num_unanswered
    if num_left:
        outcome = "kept for the next driver" if driver.keeps_journal else "cut short"
        logger.warning("requests %s: %d", outcome, num_left)
    driver.stop(mode="keep" if num_left and driver.keeps_journal else "abort")
    if has_failed:
        return 3
    return 1 if num_left else 0
