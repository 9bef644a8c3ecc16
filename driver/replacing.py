"""Replacing a worker on purpose: by the same, or execute by one with other weights."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ..protocol.board import KEEP, STOP, Board
from ..protocol.config import PipelineConfig
from ..protocol.errors import ConfigError
from ..protocol.private_file import write_private
from ..protocol.run_dir import CONFIG_FILE
from .supervisor import Supervisor

logger = logging.getLogger(__name__)

POLL_S = 0.01


def replace_worker(supervisor: Supervisor, board: Board, role: str, *, timeout_s: float) -> float:
    """End the worker, wait until its successor is ready; how many seconds that took.

    Raises:
        ConfigError: the successor failed, or was not ready in time; the supervisor goes on trying.
    """
    began, before = time.monotonic(), board.epoch(role)
    supervisor.restart(role)
    while time.monotonic() - began < timeout_s:
        if board.mode in (STOP, KEEP):
            raise ConfigError("the pipeline is being stopped")
        if supervisor.error is not None:
            raise ConfigError(f"the new {role} does not start: {supervisor.error.message}", param="role")
        epoch = board.epoch(role)
        phase = board.worker(role).phase(epoch)
        if epoch > before and phase == "ready":
            return time.monotonic() - began
        if epoch > before and phase == "failed":
            last_line = (supervisor.last_words(role).splitlines() or ["(nothing)"])[-1]
            raise ConfigError(f"the new {role} failed: {last_line}", param="role")
        time.sleep(POLL_S)
    raise ConfigError(f"the new {role} is not ready after {timeout_s:g} s", param="role")


def reload_model(
    supervisor: Supervisor,
    board: Board,
    run_dir: Path,
    config: PipelineConfig,
    changed: PipelineConfig,
    *,
    timeout_s: float,
) -> None:
    """Replace execute by one that runs the model of the ``changed`` config. Requests go on where they were.

    Raises:
        ConfigError: the model cannot be loaded, or has another vocabulary. The one before is loaded again.
    """
    write_private(run_dir / CONFIG_FILE, changed.to_json())
    try:
        replace_worker(supervisor, board, "execute", timeout_s=timeout_s)
    except BaseException:
        write_private(run_dir / CONFIG_FILE, config.to_json())
        logger.warning("model %s cannot be served; going back to %s", changed.model.model, config.model.model)
        if board.mode not in (STOP, KEEP):
            supervisor.restart("execute")  # one that was only late would come with the other model
        raise
