"""The pipeline as an object: start it, use it like a client, stop it."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

from ..protocol.board import FAILED, KEEP, ROLES, RUN, STOP, Board
from ..protocol.config import PipelineConfig
from ..protocol.errors import ConfigError, PipelineClosed, TriptychError
from ..protocol.model_card import ModelCard
from ..protocol.run_dir import (
    RunDir,
    board_path,
    check_socket_paths,
    follow_endpoint,
    submit_endpoint,
)
from .adapters import LoadedAdapters
from .blame import Blame
from .client import Client, Prompt
from .control import ControlServer
from .doorkeeper import PUBLIC_ROLES, Doorkeeper
from .health import Health, take_health
from .journal_keeper import JournalKeeper, warn_of_small_arena
from .lives import note_first_lives
from .origin import Origin
from .preparing import prepare_keys, prepare_run_dir, writing
from .replacing import Running, offer, offering, reload_model, replace_worker, wait_until_unused
from .stream import Completion, Stream
from .supervisor import Supervisor

logger = logging.getLogger(__name__)

DRAIN_CHECK_S = 0.01
CLEAN_STOP_S = 5.0  # what the workers get to say their last words
LAST_WORDS_S = 2.0  # what these take at most to arrive


class Driver:
    """Three worker processes and a client connected to them.

    It installs no signal handlers, opens no ports, and may live in any thread, several in one process. Requests go
    through the same two sockets as everybody's.

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
        """Configure a pipeline for ``start``. ``options`` are config fields; ``config`` replaces them.

        Raises:
            ConfigError: an option is unknown or cannot work.
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
        self._run_dir: RunDir | None = None
        self._board: Board | None = None
        self._supervisor: Supervisor | None = None
        self._client: Client | None = None
        self._keeper: JournalKeeper | None = None
        self._control: ControlServer | None = None
        self._doorkeepers: list[Doorkeeper] = []
        self._num_left = 0

    def __enter__(self) -> Driver:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.stop(mode="abort" if kind else "drain")
        except BaseException:  # a signal has ended the wait for answers
            self.abandon()
            raise

    def start(self, *, wait: bool = True, progress: Callable[[Driver], None] | None = None) -> Driver:
        """Start the workers and wait until all three are ready. A second call does nothing.

        ``progress`` is called a few times a second while waiting; ``phases`` says what to show.

        Raises:
            ConfigError: the run directory is in use or unsafe, or a path is too long.
            WorkerDied: a worker failed to start; its traceback is in the message.
        """
        self._origin.check()
        with self._lock:
            if self._supervisor is None:
                self._is_beginning = True
                try:
                    self._begin()
                finally:
                    self._is_beginning = False
        if wait:
            self._wait_ready(progress)
        return self

    def _begin(self) -> None:
        with ExitStack() as undo:  # what was begun, should anything after it fail
            undo.callback(self._forget)
            run_dir, keeper, board = self._open(undo)
            board.set_mode(RUN)
            blame = Blame(board, keeper.journal)
            service = self.config.service
            client = self._client = Client(
                run_dir.path,
                submit=submit_endpoint(run_dir.path, service),
                follow=follow_endpoint(run_dir.path, service),
            )
            undo.callback(client.close)
            undo.callback(self._close_doorkeepers)
            supervisor = self._supervisor = Supervisor(
                run_dir.path,
                board,
                self.config.supervisor,
                on_give_up=client.fail,
                on_death=lambda role, internal: blame.note_death(role, internal=internal),
                on_vacancy=self._fill_vacancy,
            )
            # No request of an earlier driver ends because this one did not start.
            undo.callback(supervisor.stop, CLEAN_STOP_S, mode=KEEP)
            supervisor.start()
            with writing(run_dir):
                self._control = ControlServer(
                    run_dir.path,
                    {
                        "health": lambda: self.health().to_wire(),
                        "restart": lambda role, model=None: {"seconds": self.replace(role, model=model)},
                        "load_adapter": lambda name, path: {"seconds": self.load_adapter(name, path)},
                        "unload_adapter": lambda name: {"seconds": self.unload_adapter(name)},
                    },
                )
            undo.pop_all()

    def _open(self, undo: ExitStack) -> tuple[RunDir, JournalKeeper, Board]:
        """What the workers find when they start."""
        run_dir = self._run_dir = RunDir(self._given_run_dir)
        undo.callback(self._leave, run_dir)
        check_socket_paths(run_dir.path)
        with writing(run_dir):
            keeper = self._keeper = JournalKeeper(run_dir.path, self.config)
            undo.callback(self._close_journal, keeper)
            self.config = self._loaded.restore(keeper.path, self.config)
            prepare_run_dir(run_dir.path, self.config, keeper)
            prepare_keys(run_dir.path, self.config)
            board = self._board = Board(board_path(run_dir.path))
            undo.callback(board.close)
            note_first_lives(run_dir.path, board)
        return run_dir, keeper, board

    def _fill_vacancy(self, role: str) -> None:
        """In the supervisor's thread: who still asks for the worker has to be told."""
        run_dir, board = self._run_dir, self._board
        if role in PUBLIC_ROLES and run_dir is not None and board is not None:
            self._doorkeepers.append(Doorkeeper(role, run_dir.path, self.config.service, board))

    def _wait_ready(self, progress: Callable[[Driver], None] | None) -> None:
        supervisor = self._running()
        deadline = time.monotonic() + self.config.supervisor.start_timeout_s
        try:
            while not supervisor.wait_ready(deadline, patience_s=0.1):
                if progress is not None:
                    progress(self)
        except BaseException:
            with self._lock:
                if self._supervisor is supervisor:  # another thread may have stopped that one, and started the next
                    # No request of an earlier driver ends because this one was not ready.
                    self.abandon()
            raise
        with suppress(OSError, TriptychError):  # another thread may have stopped it meanwhile
            if (card := ModelCard.read(self.run_dir)) is not None:
                warn_of_small_arena(self.config, card)

    def stop(
        self, *, mode: Literal["drain", "abort", "keep"] = "drain", timeout: float = 30.0
    ) -> dict[str, int | None]:
        """Stop the pipeline and return the workers' exit codes by role, 0 if clean. A second call does nothing.

        "drain" lets accepted requests finish for ``timeout`` seconds while new ones are refused; what is left then,
        and everything with "abort", ends with the finish reason "abort". "keep" stops at once and ends nothing: another
        driver on the same run directory or journal goes on with it. A run directory made by this driver is removed.
        In a forked child nothing happens: the pipeline is its parent's.

        Raises:
            PipelineClosed: a signal handler says it in the middle of ``start``, which this error breaks off.
        """
        if not self._origin.is_here:
            return {}
        with self._lock:
            if self._is_beginning:
                raise PipelineClosed("the driver was stopped while it started")
            supervisor, board, client = self._supervisor, self._board, self._client
            run_dir, keeper = self._run_dir, self._keeper
            if supervisor is None or board is None or client is None or run_dir is None or keeper is None:
                return {}
            if mode == "drain" and supervisor.error is None:
                self.drain(timeout)
            if mode != "keep" and keeper.num_unanswered:
                supervisor.wait_back("summarize", CLEAN_STOP_S)  # nobody else says how they end
            how = KEEP if mode == "keep" else STOP
            board.set_mode(how)  # who waits for a worker to be replaced shall not keep the control socket busy
            if self._control is not None:
                self._control.close()
            codes = supervisor.stop(CLEAN_STOP_S, mode=how)
            with ExitStack() as closing:  # also if a signal interrupts what follows
                closing.callback(self._leave, run_dir)
                closing.callback(self._close_journal, keeper)
                closing.callback(board.close)
                closing.callback(client.close)
                self._forget()  # first: whoever asks from now on is told that nothing runs
                self._close_doorkeepers()  # nobody makes one now, the supervisor's thread is gone
                if mode != "keep":
                    client.session.hear_the_ends(LAST_WORDS_S)  # the workers are gone, their words may be under way
        logger.info("stopped, exit codes %s", codes)
        return codes

    def abandon(self) -> None:
        """Stop at once. Requests that another driver can continue are kept; otherwise they end with "abort"."""
        self.stop(mode="keep" if self.keeps_journal else "abort")

    def drain(self, timeout: float = 30.0) -> bool:
        """Refuse new requests and wait for the accepted ones. Returns whether all were answered in time."""
        supervisor, board = self._running(), self._board
        assert board is not None, "a running driver has a board"
        board.begin_drain()
        if supervisor.error is not None:
            board.set_mode(FAILED)  # it gave up just now, which a drain must not hide: what waits has to end
        deadline = time.monotonic() + timeout
        time.sleep(DRAIN_CHECK_S)  # prepare may have been about to accept one
        while self.num_unanswered and supervisor.error is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(DRAIN_CHECK_S)
        return not self.num_unanswered

    @property
    def num_unanswered(self) -> int:
        """Number of accepted requests without a complete answer."""
        self._origin.check()
        if self._keeper is None:
            raise PipelineClosed("the driver is not started")
        return self._keeper.num_unanswered

    @property
    def num_left(self) -> int:
        """Number of accepted requests without a complete answer at the last stop, or when a start was interrupted."""
        return self._num_left

    @property
    def keeps_journal(self) -> bool:
        """Whether another driver can continue the requests that this one leaves unanswered."""
        return self._given_run_dir is not None or self.config.service.journal is not None

    def _leave(self, run_dir: RunDir) -> None:
        if run_dir.is_temporary:
            run_dir.remove()
        else:
            run_dir.remove_sockets()
            run_dir.unlock()

    def _close_journal(self, keeper: JournalKeeper) -> None:
        self._num_left = keeper.num_unanswered
        keeper.close()

    def _close_doorkeepers(self) -> None:
        while self._doorkeepers:
            self._doorkeepers.pop().close()

    def _forget(self) -> None:
        self._supervisor = self._board = self._client = self._run_dir = self._keeper = self._control = None

    # -- what a client can do

    @property
    def client(self) -> Client:
        """The driver's own connection to the pipeline."""
        self._running()
        assert self._client is not None, "a running driver has a client"
        return self._client

    def submit(self, prompt: Prompt | None = None, **options: Any) -> Stream:
        """Send a request and return at once; see ``Client.submit``."""
        return self.client.submit(prompt, **options)

    def generate(self, prompt: Prompt | None = None, **options: Any) -> Completion:
        """Return one complete answer; see ``Client.generate``."""
        return self.client.generate(prompt, **options)

    def generate_all(self, prompts: Iterable[Prompt | Mapping[str, Any]], **options: Any) -> list[Completion]:
        """Return the answers to many prompts; see ``Client.generate_all``."""
        return self.client.generate_all(prompts, **options)

    def abort(self, request_id: str) -> None:
        """Abort a request; see ``Client.abort``."""
        self.client.abort(request_id)

    def info(self) -> dict[str, Any]:
        """Return the model, its limits, and the limits of the service."""
        return self.client.info()

    def stats(self) -> dict[str, Any]:
        """Return statistics of every stage, and how often each was restarted."""
        return {**self.client.stats(), "restarts": self._running().num_restarts}

    # -- what only the driver can do

    @property
    def run_dir(self) -> Path:
        """The directory of the sockets, the journal and the logs, which a ``Client`` in another process needs."""
        if (run_dir := self._run_dir) is None:
            raise PipelineClosed("the driver is not started")
        return run_dir.path

    @property
    def pids(self) -> dict[str, int | None]:
        """Process ids by role; None while a worker restarts."""
        return self._running().pids

    @property
    def phases(self) -> dict[str, tuple[str, int, int]]:
        """``(phase, done, total)`` by role, for progress bars."""
        self._running()
        assert self._board is not None, "a running driver has a board"
        board = self._board
        return {r: (board.phase(r), *board.worker(r).done_of_total) for r in ROLES}

    @property
    def healthy(self) -> bool:
        """Whether every worker is ready and makes progress now."""
        return self.health().status in ("ok", "degraded")

    def health(self) -> Health:
        """Return the state of the pipeline, judged by its workers' progress. Works even after the driver gave up."""
        self._origin.check()
        supervisor, board, keeper = self._supervisor, self._board, self._keeper
        if supervisor is None or board is None or keeper is None:
            raise PipelineClosed("the driver is not started")
        return take_health(supervisor, board, keeper)

    def restart(self, role: str) -> None:
        """Replace one worker by a new process, without waiting for it. Requests continue where they were."""
        _check_role(role)
        self._running().restart(role)

    def replace(self, role: str, *, model: str | None = None, timeout: float = 300.0) -> float:
        """Replace one worker, wait until the new one is ready, and return how many seconds that took.

        With ``model`` execute goes on with other weights, which must come with the same tokenizer. Requests go on where
        they were: what they said so far stays.

        Raises:
            ConfigError: the new worker does not start, or the run directory has no room for its settings; a model that
                cannot be served is replaced by the one before.
        """
        _check_role(role)
        if model is not None and role != "execute":
            raise ConfigError(f"only execute has a model, {role} has none", param="model")
        began = time.monotonic()
        with self._replacing:  # not the lock of ``stop``, which ends a replacement
            if model is None:
                replace_worker(self._parts(), role, timeout_s=timeout)
            else:
                changed = dataclasses.replace(self.config.model, model=model)
                self._reload(dataclasses.replace(self.config, model=changed), timeout)
        return time.monotonic() - began

    def load_adapter(self, name: str, path: str | Path, *, timeout: float = 300.0) -> float:
        """Add a LoRA adapter, for the next driver on the same journal too. Returns how many seconds that took.

        Execute is replaced by one that has it. Requests go on where they were, after the pause of a restart.

        Raises:
            ConfigError: one of this name is loaded, or this one cannot be read, or execute cannot use it: then it goes
                on without it.
        """
        began = time.monotonic()
        with self._replacing:
            self._reload(self._loaded.add(self.config, name, path), timeout)
        return time.monotonic() - began

    def unload_adapter(self, name: str, *, timeout: float = 300.0) -> float:
        """Remove an adapter that was loaded while the driver ran. Returns how many seconds that took.

        New requests for it are refused at once, and those that were accepted are answered first.

        Raises:
            ConfigError: it was not loaded so, or its requests are not answered in time: then it stays.
        """
        began = time.monotonic()
        with self._replacing:
            changed, parts = self._loaded.remove(self.config, name), self._parts()
            with offering(parts, changed, self.config):
                wait_until_unused(parts, name, deadline=began + timeout)
                self._reload(changed, timeout)
        return time.monotonic() - began

    def _reload(self, changed: PipelineConfig, timeout: float) -> None:
        parts = self._parts()
        reload_model(parts, self.config, changed, timeout_s=timeout)
        self.config = changed  # which runs, also where there is no room to write of it
        with writing(parts.run_dir):
            self._loaded.keep(parts.keeper.path, changed)
            offer(parts, changed)  # not before: the next driver would not know an adapter that has requests

    def _parts(self) -> Running:
        supervisor, board, run_dir, keeper = self._running(), self._board, self._run_dir, self._keeper
        assert board is not None, "a running driver has a board"
        assert run_dir is not None, "a running driver has a run directory"
        assert keeper is not None, "a running driver has a journal"
        return Running(supervisor, board, run_dir, keeper)

    def _running(self) -> Supervisor:
        self._origin.check()
        if self._supervisor is None:
            raise PipelineClosed("the driver is not started")
        if self._supervisor.error is not None and self._client is not None:
            raise self._supervisor.error
        return self._supervisor


def _check_role(role: str) -> None:
    if role not in ROLES:
        raise ConfigError(f"role is {role!r}, known are: {', '.join(ROLES)}", param="role")
