"""The pipeline as an object: start it, use it like a client, stop it."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, get_args

from ..protocol.board import FAILED, KEEP, ROLES, STOP
from ..protocol.config import PipelineConfig
from ..protocol.errors import ConfigError, PipelineClosed, TriptychError
from ..protocol.model_card import ModelCard
from .adapters import LoadedAdapters
from .client import Client
from .control import ControlServer
from .health import Health, take_health
from .journal_keeper import JournalKeeper, warn_of_small_arena
from .origin import Origin
from .parts import Parts, Stop, open_parts
from .preparing import writing
from .replacing import Running, offer, offering, reload_model, replace_worker, wait_until_unused
from .requests import Requests
from .session import Session

logger = logging.getLogger(__name__)

DRAIN_CHECK_S = 0.01
CLEAN_STOP_S = 5.0  # time for the workers to end their requests and exit
LAST_WORDS_S = 2.0  # time for their last messages to arrive


class Driver(Requests):
    """Three worker processes and a client connected to them.

    It installs no signal handlers, opens no ports, and can be used from any thread; a process may have several. Its
    requests go through the same two sockets as those of any other client. One that was not stopped is abandoned when
    the program ends.

    >>> with Driver(model="demo") as driver:                                    # doctest: +SKIP
    ...     for delta in driver.submit(messages=[{"role": "user", "content": "What is len?"}]):
    ...         print(delta.text, end="")
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        run_dir: str | Path | None = None,
        config: PipelineConfig | None = None,
        **options: Any,
    ) -> None:
        """Starts nothing yet. ``options`` are the fields of the config dataclasses; ``config`` replaces them.

        Raises:
            ConfigError: an option is unknown or out of range.
        """
        if model is not None:
            options["model"] = model
        if config is not None and options:
            raise ConfigError(f"give a config or options, not both: {', '.join(options)}")
        self.config = config or PipelineConfig.from_options(**options)
        self._loaded = LoadedAdapters(self.config)
        self._given_run_dir = None if run_dir is None else Path(run_dir)
        self._origin = Origin("driver")
        self._lock = threading.RLock()
        self._is_beginning = False
        self._replacing = threading.Lock()
        self._started: Parts | None = None
        self._num_left = 0

    def __repr__(self) -> str:
        if (parts := self._started) is None:
            state = "not started"
        else:
            state = f"{parts.run_dir.path}, {'running' if parts.supervisor.error is None else 'failed'}"
        return f"<Driver of {self.config.model.model}, {state}>"

    def __enter__(self) -> Driver:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.stop(mode="abort" if kind else "drain")
        except BaseException:  # a signal interrupted the wait for answers
            self.abandon()
            raise

    def start(self, *, wait: bool = True, progress: Callable[[Driver], None] | None = None) -> Driver:
        """Start the workers and wait until all three are ready. A second call has no effect.

        ``progress`` is called a few times per second while waiting; see ``phases`` for what to show.

        Raises:
            ConfigError: the run directory is in use or unsafe, or a path is too long.
            WorkerDied: a worker failed to start; its traceback is in the message.
        """
        self._origin.check()
        with self._lock:
            if self._started is None:
                self._is_beginning = True
                try:
                    self._begin()
                finally:
                    self._is_beginning = False
        if wait:
            self._wait_ready(progress)
        return self

    def _begin(self) -> None:
        with ExitStack() as undo:  # if a later step fails
            undo.callback(self._forget)
            parts = self._started = open_parts(
                self._given_run_dir, self.config, self._loaded, undo, close_journal=self._close_journal
            )
            self.config = parts.config
            # KEEP: requests of an earlier driver must not end because this one failed to start.
            undo.callback(parts.supervisor.stop, CLEAN_STOP_S, mode=KEEP)
            parts.supervisor.start()
            with writing(parts.run_dir):
                parts.control = ControlServer(
                    parts.run_dir.path,
                    {
                        "health": lambda: self.health().to_wire(),
                        "restart": lambda role, model=None: {"seconds": self.replace(role, model=model)},
                        "load_adapter": lambda name, path: {"seconds": self.load_adapter(name, path)},
                        "unload_adapter": lambda name: {"seconds": self.unload_adapter(name)},
                    },
                )
            atexit.register(self.abandon)
            undo.pop_all()

    def _wait_ready(self, progress: Callable[[Driver], None] | None) -> None:
        parts = self._running()
        deadline = time.monotonic() + self.config.supervisor.start_timeout_s
        try:
            while not parts.supervisor.wait_ready(deadline, patience_s=0.1):
                if progress is not None:
                    progress(self)
        except BaseException:
            with self._lock:
                if self._started is parts:  # not stopped, and possibly started again, by another thread
                    # Requests of an earlier driver must not end because this one did not become ready.
                    self.abandon()
            raise
        with suppress(OSError, TriptychError):  # another thread may have stopped it meanwhile
            if (card := ModelCard.read(self.run_dir)) is not None:
                warn_of_small_arena(self.config, card)

    def stop(self, *, mode: Stop = "drain", timeout: float = 30.0) -> dict[str, int | None]:
        """Stop the pipeline; a second call has no effect. Returns the workers' exit codes by role, 0 if clean.

        "drain" gives accepted requests ``timeout`` seconds to finish, while new ones are refused; what is left then,
        and everything with "abort", ends with the finish reason "abort". "keep" stops at once without ending requests:
        another driver on the same run directory or journal continues them. Both also end a "drain" in another thread.
        A run directory created by this driver is removed. No effect in a forked child: the pipeline belongs to its
        parent.

        Raises:
            PipelineClosed: called by a signal handler during ``start``, which this error interrupts.
            ConfigError: the mode is unknown.
        """
        if mode not in (modes := get_args(Stop)):
            raise ConfigError(f"mode is {mode!r}, known are: {', '.join(modes)}", param="mode")
        if not self._origin.is_here:
            return {}
        if mode != "drain" and (parts := self._started) is not None:
            parts.hurry = mode  # before the lock, which a drain holds
        with self._lock:
            if self._is_beginning:
                raise PipelineClosed("the driver was stopped while it started")
            if (parts := self._started) is None:
                return {}
            if mode == "drain" and parts.supervisor.error is None:
                self.drain(timeout)
            mode = parts.hurry or mode
            if mode != "keep" and parts.keeper.has_unread_ends:
                parts.supervisor.wait_back("summarize", CLEAN_STOP_S)  # only summarize ends them and informs clients
            how = KEEP if mode == "keep" else STOP
            parts.board.set_mode(how)  # now: a running replacement must not keep the control socket busy
            if parts.control is not None:
                parts.control.close()
            codes = parts.supervisor.stop(CLEAN_STOP_S, mode=how)
            with ExitStack() as closing:  # even if a signal interrupts what follows
                closing.callback(parts.run_dir.leave)
                closing.callback(self._close_journal, parts.keeper)
                closing.callback(parts.memory.close)
                closing.callback(parts.board.close)
                closing.callback(parts.client.close)
                self._forget()  # first: from now on every caller gets PipelineClosed
                parts.stand_ins.close()  # the supervisor's thread has ended, so no more are created
                if mode != "keep":
                    parts.client.session.wait_for_ends(LAST_WORDS_S)  # of workers that are gone, but may be in flight
        logger.info("stopped, exit codes %s", codes)
        return codes

    def abandon(self) -> None:
        """Stop at once. Requests that another driver can continue are kept for it; others end with "abort"."""
        self.stop(mode="keep" if self.keeps_journal else "abort")

    def drain(self, timeout: float = 30.0) -> bool:
        """Refuse new requests and wait for the accepted ones; True if all were answered in time."""
        parts = self._running()
        supervisor = parts.supervisor
        parts.board.begin_drain()
        if supervisor.error is not None:
            parts.board.set_mode(FAILED)  # it gave up just now, which a drain must not hide: requests have to end
        deadline = time.monotonic() + timeout
        time.sleep(DRAIN_CHECK_S)  # prepare may have been about to accept one
        while self.num_unanswered and supervisor.error is None:
            if time.monotonic() > deadline or parts.hurry:
                return False
            time.sleep(DRAIN_CHECK_S)
        return not self.num_unanswered

    @property
    def num_unanswered(self) -> int:
        """Accepted requests whose answer is not complete."""
        return self._parts().keeper.num_unanswered

    @property
    def num_left(self) -> int:
        """Accepted requests without a complete answer at the last stop or failed start."""
        return self._num_left

    @property
    def keeps_journal(self) -> bool:
        """Whether another driver can continue what this one leaves unanswered."""
        return self._given_run_dir is not None or self.config.service.journal is not None

    def _close_journal(self, keeper: JournalKeeper) -> None:
        self._num_left = keeper.num_unanswered
        keeper.close()

    def _forget(self) -> None:
        self._started = None
        atexit.unregister(self.abandon)

    def _parts(self) -> Parts:
        """Its parts, even after it gave up."""
        self._origin.check()
        if (parts := self._started) is None:
            raise PipelineClosed("the driver is not started")
        return parts

    def _running(self) -> Parts:
        """Its parts, unless it gave up."""
        parts = self._parts()
        if parts.supervisor.error is not None:
            raise parts.supervisor.error
        return parts

    # -- what a client can do

    @property
    def client(self) -> Client:
        """Its own connection to the pipeline."""
        return self._running().client

    @property
    def _session(self) -> Session:
        return self.client.session

    def stats(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return queues, pages, rates and totals of every stage, up to 250 ms old, and its number of restarts."""
        return {**super().stats(timeout), "restarts": self._running().supervisor.num_restarts}

    # -- what only the driver can do

    @property
    def run_dir(self) -> Path:
        """The folder of the sockets, the journal and the logs; a ``Client`` in another process connects to it."""
        if (parts := self._started) is None:
            raise PipelineClosed("the driver is not started")
        return parts.run_dir.path

    @property
    def pids(self) -> dict[str, int | None]:
        """Process ids by role; None while a worker is being restarted."""
        return self._running().supervisor.pids

    @property
    def phases(self) -> dict[str, tuple[str, int, int]]:
        """``(phase, done, total)`` by role, for progress bars."""
        board = self._running().board
        return {r: (board.phase(r), *board.worker(r).done_of_total) for r in ROLES}

    @property
    def healthy(self) -> bool:
        """Whether every worker is ready and making progress."""
        return self.health().status in ("ok", "degraded")

    def health(self) -> Health:
        """The health of the pipeline, judged by its workers' progress. Works even after the driver gave up."""
        return take_health(self._parts())

    def restart(self, role: str) -> None:
        """Replace one worker by a new process, without waiting for it. Requests continue where they were."""
        _check_role(role)
        self._replaceable().supervisor.restart(role)

    def replace(self, role: str, *, model: str | None = None, timeout: float = 300.0) -> float:
        """Replace one worker and wait until the new one is ready; returns the seconds this took.

        With ``model``, execute continues with other weights, which must use the same tokenizer. Requests continue where
        they were, and keep the tokens they have.

        Raises:
            ConfigError: the new worker does not start, or the run directory has no space for its settings; if a model
                cannot be served, the previous one is loaded again.
        """
        _check_role(role)
        if model is not None and role != "execute":
            raise ConfigError(f"only execute has a model, {role} has none", param="model")
        began = time.monotonic()
        with self._replacing:  # not the lock of ``stop``, which must be able to interrupt a replacement
            if model is None:
                replace_worker(self._replaceable(), role, timeout_s=timeout)
            else:
                changed = dataclasses.replace(self.config.model, model=model)
                self._reload(dataclasses.replace(self.config, model=changed), timeout)
        return time.monotonic() - began

    def load_adapter(self, name: str, path: str | Path, *, timeout: float = 300.0) -> float:
        """Serve a LoRA adapter from now on, including under the next driver on this journal; returns the seconds taken.

        Execute takes it up between two steps, or is replaced by a process that has it: then requests continue where
        they were, after the pause of a restart.

        Raises:
            ConfigError: the name is taken, the adapter cannot be read, or execute cannot use it: it then continues
                without it.
        """
        began = time.monotonic()
        with self._replacing:
            self._reload(self._loaded.add(self.config, name, path), timeout)
        return time.monotonic() - began

    def unload_adapter(self, name: str, *, timeout: float = 300.0) -> float:
        """Unload an adapter that was loaded while the driver ran; returns the seconds this took.

        New requests for it are refused at once; those already accepted are answered first.

        Raises:
            ConfigError: it was not loaded that way, or its requests are not answered in time: it then stays.
        """
        began = time.monotonic()
        with self._replacing:
            changed, parts = self._loaded.remove(self.config, name), self._replaceable()
            with offering(parts, changed, self.config):
                wait_until_unused(parts, name, deadline=began + timeout)
                self._reload(changed, timeout)
        return time.monotonic() - began

    def _reload(self, changed: PipelineConfig, timeout: float) -> None:
        parts = self._replaceable()
        reload_model(parts, self.config, changed, timeout_s=timeout)
        self.config = changed  # now in effect, even if there is no space to save it
        with writing(parts.run_dir):
            self._loaded.keep(parts.keeper.path, changed)
            offer(parts, changed)  # only now: the next driver must know every adapter that has requests

    def _replaceable(self) -> Running:
        """
        Raises:
            ConfigError: a new worker would be of another version.
        """
        parts = self._running()
        parts.supervisor.installation.check()
        return Running(parts.supervisor, parts.board, parts.run_dir, parts.keeper)


def _check_role(role: str) -> None:
    if role not in ROLES:
        raise ConfigError(f"role is {role!r}, known are: {', '.join(ROLES)}", param="role")
