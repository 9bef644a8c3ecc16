"""Replacing a worker on purpose: by the same, or execute by one with other weights or other adapters."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ..protocol.board import KEEP, STOP, Board
from ..protocol.config import HASH_MODEL, PipelineConfig
from ..protocol.errors import ConfigError, TriptychError
from ..protocol.lora import PARAM as LORA_PARAM
from ..protocol.model_card import Offer
from ..protocol.private_file import write_private
from ..protocol.run_dir import CONFIG_FILE, MODE, RunDir
from .journal_keeper import JournalKeeper
from .preparing import writing
from .processes import last_words, start_process
from .supervisor import Supervisor

logger = logging.getLogger(__name__)

_REHEARSAL = "execute.rehearse"
_OUR_ERROR = re.compile(rf"{re.escape(TriptychError.__module__)}\.\w+: ")
POLL_S = 0.01
UNUSED_POLL_S = 0.05  # which looks at every request


class Running(NamedTuple):
    """A pipeline that has been started."""

    supervisor: Supervisor
    board: Board
    run_dir: RunDir
    keeper: JournalKeeper

    @property
    def is_stopping(self) -> bool:
        with suppress(AttributeError):  # another thread has stopped the driver, and closed the board
            return self.board.mode in (STOP, KEEP)
        return True

    def check(self) -> None:
        """
        Raises:
            ConfigError: nothing is replaced any more.
        """
        if self.is_stopping:
            raise ConfigError("the pipeline is being stopped")


def replace_worker(running: Running, role: str, *, timeout_s: float) -> None:
    """End the worker, wait until its successor is ready.

    Raises:
        ConfigError: the successor failed, or was not ready in time; the supervisor goes on trying.
    """
    supervisor, board = running.supervisor, running.board
    began, before = time.monotonic(), board.epoch(role)
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
            raise has_failed(role, supervisor.last_words(role))
        time.sleep(POLL_S)
    raise ConfigError(f"the new {role} is not ready after {timeout_s:g} s", param="role")


def has_failed(role: str, words: str) -> ConfigError:
    """``words``: the last of a process that was to be the new ``role``."""
    last_line = (words.splitlines() or ["(nothing)"])[-1]
    return ConfigError(f"the new {role} failed: {_OUR_ERROR.sub('', last_line)}", param="role")


def rehearse(running: Running, config: PipelineConfig, *, timeout_s: float) -> None:
    """Try in another process what can be tried without ending execute: so nobody waits for what is found out.

    Raises:
        ConfigError: execute cannot run so.
    """
    if config.model.model == HASH_MODEL:
        return
    folder, deadline = running.run_dir.path / _REHEARSAL, time.monotonic() + timeout_s
    shutil.rmtree(folder, ignore_errors=True)  # of a driver that was killed
    folder.mkdir(mode=MODE)
    try:
        write_private(folder / CONFIG_FILE, config.to_json())
        process = start_process(folder, _REHEARSAL, arguments=[], stdin=subprocess.DEVNULL, log=None)
        try:
            while process.poll() is None:
                running.check()
                if time.monotonic() >= deadline:
                    raise ConfigError(f"testing the new execute takes longer than {timeout_s:g} s", param="role")
                time.sleep(POLL_S)
        finally:
            process.kill()
            code = process.wait()
        if code > 0:
            raise has_failed("execute", last_words(folder, _REHEARSAL))
        if code < 0:
            logger.warning("the new execute could not be tested: the test process ended with exit code %d", code)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def reload_model(running: Running, config: PipelineConfig, changed: PipelineConfig, *, timeout_s: float) -> None:
    """Replace execute by one that runs the model of the ``changed`` config. Requests go on where they were.

    Raises:
        ConfigError: the model or an adapter cannot be loaded, or has another vocabulary: those of ``config`` are loaded
            again. Or the run directory has no room for the settings.
    """
    for module in changed.model.adapters:
        module.digest()  # one that cannot be read is told of before anything ends
    file = running.run_dir.path / CONFIG_FILE
    with writing(running.run_dir):
        rehearse(running, changed, timeout_s=timeout_s)
        write_private(file, changed.to_json())
        try:
            replace_worker(running, "execute", timeout_s=timeout_s)
        except BaseException:
            write_private(file, config.to_json())
            logger.warning("execute cannot run with the changed settings; going back to those before")
            if not running.is_stopping:
                _end_life(running, "execute")  # one that was only late would come with the changed ones
            raise
    running.keeper.name_model(changed.model.model)


def _end_life(running: Running, role: str) -> None:
    """Return once the present life of a worker is over."""
    epoch = running.board.epoch(role)
    running.supervisor.restart(role)
    while not running.is_stopping and running.supervisor.error is None and running.board.epoch(role) == epoch:
        time.sleep(POLL_S)


def wait_until_unused(running: Running, adapter: str, *, deadline: float) -> None:
    """Return once every request for an adapter that is not offered any more, and that was accepted, is answered.

    Raises:
        ConfigError: not all are by ``deadline`` (time.monotonic).
    """
    began_ns = time.monotonic_ns()
    while True:
        # Who was about to accept one when it was withdrawn has written it down before it shows progress again.
        is_refused = running.board.worker("prepare").progress_ns > began_ns
        count = sum(name == adapter for name, _ in running.keeper.unanswered_adapters())
        if is_refused and not count:
            return
        if time.monotonic() >= deadline:
            why = f"{count} requests for the adapter {adapter!r} are not answered yet" if count else "prepare is away"
            raise ConfigError(why, param=LORA_PARAM)
        time.sleep(UNUSED_POLL_S)
        running.check()  # before the journal, which who stops the driver closes


def offer(running: Running, config: PipelineConfig) -> None:
    """Let new requests name the adapters of ``config``, and no others."""
    Offer(tuple(module.name for module in config.model.adapters)).publish(running.run_dir.path)


@contextmanager
def offering(running: Running, changed: PipelineConfig, config: PipelineConfig) -> Iterator[None]:
    """From the beginning of this block on prepare refuses requests for adapters that ``changed`` does not have, and if
    it fails only until then.
    """
    offer(running, changed)
    try:
        yield
    except BaseException:
        offer(running, config)
        raise
