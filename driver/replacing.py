"""Deliberate replacement of a worker: by a fresh process, or of execute by one with other weights or adapters."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

from ..protocol.board import KEEP, STOP, Board
from ..protocol.config import HASH_MODEL, PipelineConfig
from ..protocol.errors import ConfigError, TriptychError
from ..protocol.lora import PARAM as LORA_PARAM
from ..protocol.model_card import ModelCard, Offer
from ..protocol.private_file import FOLDER_MODE, write_private
from ..protocol.run_dir import ADAPT_FILE, CONFIG_FILE
from .journal_keeper import JournalKeeper
from .preparing import writing
from .processes import last_log_lines, start_process
from .run_dir import RunDir
from .supervisor import Supervisor

logger = logging.getLogger(__name__)

_REHEARSAL = "execute.rehearse"
_OUR_ERROR = re.compile(rf"{re.escape(TriptychError.__module__)}\.\w+: ")
POLL_S = 0.01
UNUSED_POLL_S = 0.05  # longer: each poll reads every request


class Running(NamedTuple):
    """The parts of a pipeline that has been started."""

    supervisor: Supervisor
    board: Board
    run_dir: RunDir
    keeper: JournalKeeper

    @property
    def is_stopping(self) -> bool:
        with suppress(AttributeError):  # another thread has stopped the driver and closed the board
            return self.board.mode in (STOP, KEEP)
        return True

    def check(self) -> None:
        """
        Raises:
            ConfigError: the pipeline is stopping.
        """
        if self.is_stopping:
            raise ConfigError("the pipeline is being stopped")


def replace_worker(running: Running, role: str, *, timeout_s: float) -> None:
    """End the worker and wait until its successor is ready.

    A worker that makes no progress is first given the time in which the supervisor finds it hung: otherwise a request
    that hangs every incarnation would never be found out if workers are replaced often.

    Raises:
        ConfigError: the successor failed or was not ready in time; the supervisor keeps trying.
    """
    supervisor, board = running.supervisor, running.board
    began, before = time.monotonic(), board.epoch(role)
    _wait_for_progress(running, role, epoch=before, deadline=began + timeout_s)
    if board.epoch(role) == before:  # otherwise it has been replaced meanwhile
        supervisor.restart(role)
    while time.monotonic() - began < timeout_s:
        running.check()
        if supervisor.error is not None:
            raise ConfigError(f"the new {role} does not start: {supervisor.error.message}", param="role")
        epoch = board.epoch(role)
        phase = board.worker(role).phase(epoch)
        if epoch > before and phase == "ready":
            return
        if epoch > before and phase == "failed":
            raise has_failed(role, supervisor.last_log_lines(role))
        time.sleep(POLL_S)
    raise ConfigError(f"the new {role} is not ready after {timeout_s:g} s", param="role")


def _wait_for_progress(running: Running, role: str, *, epoch: int, deadline: float) -> None:
    """Return at the next sign of progress of this incarnation or at its end, and at once if it is not ready."""
    board, page, began_ns = running.board, running.board.worker(role), time.monotonic_ns()
    while board.epoch(role) == epoch and board.ready(role) and page.progress_ns <= began_ns:
        running.check()
        if time.monotonic() >= deadline:
            return
        time.sleep(POLL_S)


def has_failed(role: str, words: str) -> ConfigError:
    """The error for a failed successor of ``role``; ``words`` are its last log lines."""
    last_line = (words.splitlines() or ["(nothing)"])[-1]
    return ConfigError(f"the new {role} failed: {_OUR_ERROR.sub('', last_line)}", param="role")


def rehearse(running: Running, config: PipelineConfig, *, timeout_s: float) -> None:
    """Try in a separate process whatever can be tried while execute is running, so that failures interrupt nobody.

    Raises:
        ConfigError: execute cannot run with this config.
    """
    if config.model.model == HASH_MODEL:
        return
    folder, deadline = running.run_dir.path / _REHEARSAL, time.monotonic() + timeout_s
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed driver
    folder.mkdir(mode=FOLDER_MODE)
    try:
        write_private(folder / CONFIG_FILE, config.to_json())
        cwd = running.supervisor.cwd
        process = start_process(folder, _REHEARSAL, arguments=[], stdin=subprocess.DEVNULL, cwd=cwd)
        try:
            while process.poll() is None:
                running.check()
                if time.monotonic() >= deadline:
                    text = f"the trial run of the new execute did not end within {timeout_s:g} s"
                    raise ConfigError(text, param="role")
                time.sleep(POLL_S)
        finally:
            process.kill()
            code = process.wait()
        if code > 0:
            raise has_failed("execute", last_log_lines(folder, _REHEARSAL))
        if code < 0:
            logger.warning("the trial run of the new execute was killed (exit code %d); replacing it anyway", code)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def reload_model(running: Running, config: PipelineConfig, changed: PipelineConfig, *, timeout_s: float) -> None:
    """Let execute take up the adapters of the ``changed`` config, or replace it by one that runs its model. Requests
    continue where they were.

    Raises:
        ConfigError: the model or an adapter cannot be loaded, or has another vocabulary: those of ``config`` are loaded
            again. Or there is no disk space for the settings.
    """
    for module in changed.model.adapters:
        module.digest()  # reports an unreadable one before anything is stopped
    file = running.run_dir.path / CONFIG_FILE
    with writing(running.run_dir):
        rehearse(running, changed, timeout_s=timeout_s)
        write_private(file, changed.to_json())
        try:
            if not _adapts(running, config, changed, timeout_s=timeout_s):
                replace_worker(running, "execute", timeout_s=timeout_s)
        except BaseException:
            write_private(file, config.to_json())
            logger.warning("execute cannot run with the changed settings; reverting them")
            if not running.is_stopping:
                _restart_worker(running, "execute")  # it may only be late, and would start with the changed settings
            raise
    running.keeper.name_model(changed.model.model)


def _adapts(running: Running, config: PipelineConfig, changed: PipelineConfig, *, timeout_s: float) -> bool:
    """Whether execute has taken up the adapters of ``changed``, which are all that is new in it, while it runs.

    Otherwise it has to be replaced: it cannot, or has crashed meanwhile and may have found either settings.
    """
    with_adapters = replace(config, model=replace(config.model, lora_modules=changed.model.lora_modules))
    epoch, board, supervisor = running.board.epoch("execute"), running.board, running.supervisor
    if with_adapters != changed or not board.ready("execute"):
        return False
    file, deadline = running.run_dir.path / ADAPT_FILE, time.monotonic() + timeout_s
    write_private(file, "")
    try:
        while file.exists():
            is_same = board.epoch("execute") == epoch and supervisor.error is None
            if not is_same or time.monotonic() >= deadline:
                return False
            running.check()
            time.sleep(POLL_S)
    finally:
        file.unlink(missing_ok=True)
    card = ModelCard.read(running.run_dir.path)
    return card is not None and set(card.adapters) == {module.name for module in changed.model.adapters}


def _restart_worker(running: Running, role: str) -> None:
    """End the current incarnation of a worker and return once it is over."""
    epoch = running.board.epoch(role)
    running.supervisor.restart(role)
    while not running.is_stopping and running.supervisor.error is None and running.board.epoch(role) == epoch:
        time.sleep(POLL_S)


def wait_until_unused(running: Running, adapter: str, *, deadline: float) -> None:
    """Wait until every accepted request for an adapter that is no longer offered is answered.

    Raises:
        ConfigError: not all are by ``deadline`` (time.monotonic).
    """
    began_ns = time.monotonic_ns()
    while True:
        # If prepare was accepting one when the offer was withdrawn, the journal has it before prepare's next progress.
        is_refused = running.board.worker("prepare").progress_ns > began_ns
        count = sum(name == adapter for name, _ in running.keeper.unanswered_adapters())
        if is_refused and not count:
            return
        if time.monotonic() >= deadline:
            why = f"{count} requests for the adapter {adapter!r} are not answered yet" if count else "prepare is down"
            raise ConfigError(why, param=LORA_PARAM)
        time.sleep(UNUSED_POLL_S)
        running.check()  # before the next access to the journal, which a stop closes


def offer(running: Running, config: PipelineConfig) -> None:
    """Let new requests name the adapters of ``config``, and no others."""
    Offer(tuple(module.name for module in config.model.adapters)).publish(running.run_dir.path)


@contextmanager
def offering(running: Running, changed: PipelineConfig, config: PipelineConfig) -> Iterator[None]:
    """Inside this block prepare refuses requests for adapters that ``changed`` does not have; if the block fails they
    are offered again.
    """
    offer(running, changed)
    try:
        yield
    except BaseException:
        offer(running, config)
        raise
