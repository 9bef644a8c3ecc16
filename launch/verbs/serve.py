"""``triptych serve``: the pipeline for clients in other processes, until a signal ends it."""

from __future__ import annotations

import logging
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...driver.driver import Driver
from ...protocol.config import PipelineConfig
from ...protocol.errors import ConfigError, PipelineClosed, TriptychError
from ...protocol.model_card import ModelCard
from ..gateway.config import GatewayConfig
from ..gateway.serving.processes import gateways, listening_for
from ..gateway.serving.tls import check_certificate
from ..signals import handle_unless_ignored, signals_ignored
from ..systemd import notify
from ..terminal.report import model_line, statistics_line
from ..terminal.startup import start

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

STATISTICS_S = 1.0
MAX_DRAIN_S = 86400  # a day


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The arguments of ``serve``."""

    config: PipelineConfig
    gateway: GatewayConfig
    run_dir: Path | None
    drain_timeout: float  # seconds for accepted requests to finish at a stop
    log_level: str

    def __post_init__(self) -> None:
        if not 0 <= self.drain_timeout <= MAX_DRAIN_S:  # refuses NaN too
            text = f"drain_timeout is {self.drain_timeout}, the limits are 0 and {MAX_DRAIN_S}"
            raise ConfigError(text, param="drain_timeout")


def serve(task: Task, *, console: Console) -> int:
    """Serve until SIGINT or SIGTERM, then drain; a second signal stops at once.

    Returns 0 if every accepted request was answered, 1 if some were cut short or left to the next driver, 3 if the
    driver had given up restarting a worker; in that case it kept answering status queries until the signal.

    The gateways outlive the workers by a moment, so that waiting HTTP clients still receive the ends of their requests.

    Raises:
        ConfigError: the run directory is in use or unsafe, the HTTP address is not available, its keys are not
            readable, its certificate cannot be used, or the folder for adapters does not exist.
        WorkerDied: a worker failed to start.
    """
    handle_unless_ignored(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C
    check_certificate(task.gateway)
    task.gateway.check_names(task.config.model)
    task.gateway.check_lora_root()
    task.gateway.api_keys()
    code = 0
    driver = Driver(run_dir=task.run_dir, config=task.config)
    with ExitStack() as stack:
        listener = stack.enter_context(listening_for(task.gateway))  # first: a taken port is known at once
        try:
            driver.start(wait=False)
            url = stack.enter_context(gateways(task.gateway, listener, driver.run_dir, log_level=task.log_level))
            _start(driver, console, url)
            _report_for_ever(driver)
        except KeyboardInterrupt:
            notify("STOPPING=1")
            with suppress(KeyboardInterrupt, TriptychError):  # the second signal, or one that came before the start
                _drain(driver, task.drain_timeout)
        finally:
            stack.enter_context(signals_ignored())
            code = _stop(driver)
    return code


def _start(driver: Driver, console: Console, url: str | None) -> None:
    """Wait until the pipeline is ready, and log that."""
    startup = start(driver, console, say=logger.info)
    for line in startup.account(driver.pids):
        logger.info("%s", line)
    # Not asked of prepare, which may be on its way back, or was stopped along with this process.
    if (card := ModelCard.read(driver.run_dir)) is not None:
        logger.info("model %s", model_line(card.to_wire()))
    if url is not None:
        logger.info("http: %s", url)
    logger.info("ready: triptych generate --connect %s", driver.run_dir)
    notify("READY=1")


def _report_for_ever(driver: Driver) -> None:
    """Log the statistics once a second while they change. The watchdog of a service manager, if there is one, hears
    nothing any more once the driver has given up.
    """
    last, counted, then = "", (0, 0), time.monotonic()
    while True:
        time.sleep(STATISTICS_S)
        # A worker is being restarted, was given up, or has not published any statistics yet.
        with suppress(TriptychError, KeyError):
            stats = driver.client.stats(timeout=STATISTICS_S)
            now = time.monotonic()
            counts = stats["summarize"]["tokens"], stats["execute"]["prefill_tokens"]
            # A restarted worker counts from 0.
            rate, prompt_rate = (max(0, new - old) / (now - then) for new, old in zip(counts, counted, strict=True))
            counted, then = counts, now
            line = statistics_line(stats, tokens_per_second=rate, prompt_tokens_per_second=prompt_rate)
            if line != last:
                logger.info("%s", line)
                notify(f"STATUS={line}")
                last = line
        if (health := driver.health()).status != "failed":
            notify("WATCHDOG=1")
        elif last != health.reason:
            last = health.reason
            notify(f"STATUS={last}")
            logger.error("%s; nothing is served any more, a signal ends this process with exit code 3", health.reason)


def _drain(driver: Driver, timeout: float) -> None:
    if driver.health().status == "failed":
        return  # everything has already ended
    logger.info(
        "draining for at most %g s, requests left: %d; the next signal stops at once", timeout, driver.num_unanswered
    )
    driver.drain(timeout)


def _stop(driver: Driver) -> int:
    """Stop at once, keeping unanswered requests for the next driver if possible. Returns the exit code."""
    try:
        has_failed, num_left = driver.health().status == "failed", driver.num_unanswered
    except PipelineClosed:  # its start was interrupted
        has_failed, num_left = False, driver.num_left
    if num_left:
        outcome = "kept for the next driver" if driver.keeps_journal else "cut short"
        logger.warning("requests %s: %d", outcome, num_left)
    driver.stop(mode="keep" if num_left and driver.keeps_journal else "abort")
    if has_failed:
        return 3
    return 1 if num_left else 0
