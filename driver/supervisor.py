"""Starts the three workers, detects crashes and hangs, and restarts them.

All of it happens in one thread, which also starts the processes: Linux ties PR_SET_PDEATHSIG to the thread that forked,
so a worker, or what forks it, must not be started by a thread that may end before the driver does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..protocol.board import FAILED, KEEP, ROLES, STARTING, STOP, Board
from ..protocol.config import SupervisorConfig
from ..protocol.errors import JournalError, PipelineClosed, TriptychError, WorkerDied
from ..protocol.starvation import OwnTime
from ..protocol.system_calls import pidfd_open
from ..protocol.threads import start_thread
from .deaths import Death, OomWatch, exit_code, is_internal, is_lack, what_was_lacking
from .flag import Flag
from .fork_servers import FORK_S, ForkServers
from .processes import ForkedProcess, Process, last_log_lines, open_cwd, start_process, why_not_started
from .upgrade import Installation
from .worker import Worker, WorkerHealth

logger = logging.getLogger(__name__)

CHECK_S = 0.25  # how often to check for hangs
START_CHECK_S = 0.02
BEGIN_S = 1.0  # a thread that has not begun by then never will


class Supervisor:
    """Keeps three workers running in one run directory until stopped.

    Invariant: at most one live process per role; every process has an epoch of its own.
    """

    def __init__(
        self,
        run_dir: Path,
        board: Board,
        config: SupervisorConfig,
        *,
        on_give_up: Callable[[TriptychError], None],
        on_death: Callable[[Death], int] = lambda death: 0,
        on_vacancy: Callable[[str], None] = lambda role: None,
        on_look: Callable[[Worker], None] = lambda worker: None,
    ) -> None:
        """All callbacks run in the supervisor's thread: ``on_give_up`` once, when a worker will not be restarted any
        more; ``on_death`` before a dead one is restarted, which returns how many deaths are now explained, or raises
        JournalError if no worker can run; ``on_vacancy(role)`` once a worker that will not be restarted is gone;
        ``on_look(worker)`` for each worker, a few times per second.
        """
        self._on_give_up, self._on_death, self._on_vacancy, self._on_look = on_give_up, on_death, on_vacancy, on_look
        self._run_dir, self._board, self._config = run_dir, board, config
        self._oom, self.installation = OomWatch(), Installation()
        self._workers = {role: Worker(role) for role in ROLES}
        self._selector = selectors.DefaultSelector()
        self._bell_out, self._bell_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._bell_out, selectors.EVENT_READ, self._drain_bell)
        self._stop_out, self._stop_in = os.pipe2(os.O_CLOEXEC)  # stdin of all workers; never read, so it wakes them all
        # As it is now: paths in the config may be relative to it, and the host program may change it later.
        self.cwd = open_cwd()
        self._thread = threading.Thread(target=self._run, name="triptych-supervisor", daemon=True)
        self._has_begun = Flag()
        self._changed = threading.Condition()
        self._orders: deque[Callable[[], None]] = deque()
        self._forks = ForkServers(run_dir, self._selector, cwd=self.cwd, on_end=self._oom.has_killed)
        self._vacant: set[str] = set()  # roles already reported by ``on_vacancy``
        self._stopping = self._ended = self._was_ready = False
        self._exit_codes: dict[str, int | None] = {}
        self._has_left = False  # the thread will touch nothing any more
        self._looked_at = time.monotonic()
        self.error: TriptychError | None = None  # why the supervisor gave up

    def start(self) -> None:
        start_thread(self._thread)

    @property
    def pids(self) -> dict[str, int | None]:
        return {role: w.pid for role, w in self._workers.items()}

    @property
    def num_restarts(self) -> dict[str, int]:
        return {role: w.num_restarts for role, w in self._workers.items()}

    def wait_ready(self, deadline: float, *, patience_s: float) -> bool:
        """Wait for every worker to be ready, at most ``patience_s``; False if one is not ready yet.

        Raises:
            WorkerDied: one died while starting, with its last log lines, or ``deadline`` (time.monotonic) has passed.
            PipelineClosed: stopped by another thread, or by a signal handler in this one.
        """
        until = min(deadline, time.monotonic() + patience_s)
        with self._changed:
            while self._stopping or not self._all_ready():
                if self.error is not None:
                    raise self.error
                if self._stopping:  # stopping closes the board, but not while this thread holds the lock
                    raise PipelineClosed("the driver was stopped while it started")
                if (left := until - time.monotonic()) <= 0:
                    break
                self._changed.wait(min(left, START_CHECK_S))
            else:
                self._was_ready = True
                return True
        if time.monotonic() >= deadline:
            late = next(role for role in ROLES if not self._board.ready(role))
            raise WorkerDied(late, None, f"(it was not ready in time)\n{self.last_log_lines(late)}")
        return False

    def _all_ready(self) -> bool:
        with contextlib.suppress(AttributeError):  # a signal handler, to which the lock is open, has closed the board
            return all(self._board.ready(role) for role in ROLES)
        return False

    def health(self, role: str) -> WorkerHealth:
        """A worker's health, judged by its progress and not by its process, which an order may be about to end."""
        worker, page, epoch = self._workers[role], self._board.worker(role), self._board.epoch(role)
        phase = "failed" if worker.abandoned else page.phase(epoch)
        silent_s, patience_s = self._silence(worker)
        is_ok = phase == "ready" and worker.alive and not (worker.killed or self._orders) and silent_s <= patience_s
        return worker.health(phase=phase, ok=is_ok, since_progress_s=silent_s, epoch=epoch)

    @property
    def crowded(self) -> list[str]:
        """The roles whose processes end because they may open no file for another client."""
        now = time.monotonic()
        return [role for role, worker in self._workers.items() if worker.is_crowded(now)]

    def wait_back(self, role: str, timeout_s: float) -> None:
        """Wait until a worker that was ready before is so again, is given up, or ``timeout_s`` has passed."""
        deadline = time.monotonic() + timeout_s
        while self._was_ready and self.error is None and not self.health(role).ok and time.monotonic() < deadline:
            time.sleep(START_CHECK_S)

    def restart(self, role: str) -> None:
        """Kill a worker; the usual handling of a death starts the next one."""
        self._order(self._workers[role].kill)

    def stop(self, timeout_s: float, *, mode: int) -> dict[str, int | None]:
        """Tell the workers to exit, by STOP or KEEP on the board, wait for them, then kill those still running.

        Returns the exit codes by role. Call it again if it was interrupted by a signal. After a ``start`` that failed
        or was interrupted, the thread may never begin.
        """
        if self._has_begun.wait(BEGIN_S):
            self._order(lambda: self._begin_stop(mode))
            clock = OwnTime(*filter(None, self.pids.values()))
            while not self._wait_for_ends(max(0.0, timeout_s - clock.elapsed_s)):
                if clock.elapsed_s > timeout_s:
                    logger.warning("killing workers that did not stop within %.1f s", timeout_s)
                    self._order(self._kill_all)
                    timeout_s = threading.TIMEOUT_MAX
            self._order(self._end)
            with self._changed:  # released while waiting, even if a signal interrupts a thread that waits with it
                self._changed.wait_for(lambda: self._has_left)
            self._thread.join()
        self._end()
        with self._changed:
            if self._bell_in >= 0:
                os.close(self._bell_in)
                self._bell_in = -1
        return dict(self._exit_codes)

    def _wait_for_ends(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping and not any(self.pids.values()), timeout_s)

    def last_log_lines(self, role: str) -> str:
        """The last lines of the worker's log."""
        return last_log_lines(self._run_dir, role)

    # -- everything below runs in the supervisor's thread

    def _run(self) -> None:
        self._has_begun.set()
        if self._config.fork_workers and not self._stopping:
            self._forks.start()
        while not self._ended:
            try:
                with contextlib.suppress(SystemExit):  # of a handler of the log, as rich's if nobody reads it
                    self._turn()
            except JournalError as error:  # of ``on_death``
                self._give_up(None, error)
            except Exception as error:  # last line of defence: nothing may end this thread silently
                logger.exception("the supervisor failed")
                self._give_up(None, TriptychError(f"the supervisor failed: {error!r}"))
                time.sleep(CHECK_S)  # every turn may fail: the log must not fill the disk
        with self._changed:
            self._has_left = True
            self._changed.notify_all()

    def _turn(self) -> None:
        now = time.monotonic()
        for worker in self._workers.values():
            if self._is_missing(worker) and now >= worker.start_at:
                self._try_to_spawn(worker)
        for key, _ in self._selector.select(self._patience(now)):
            key.data()
        while self._orders:
            self._orders.popleft()()
        self._look_for_hangs()
        self._replace_fork_servers()
        self._report_vacancies()

    def _is_wanted(self, worker: Worker) -> bool:
        """Whether the worker should run: not once it was given up, and not during a stop, which workers may see on the
        board, and exit, before this thread learns of it.
        """
        return not (worker.abandoned or self._board.mode in (STOP, KEEP))

    def _is_missing(self, worker: Worker) -> bool:
        """Whether to start it, as soon as its back-off ends."""
        return self._is_wanted(worker) and not worker.alive and not self._forks.is_coming(worker.role)

    def _patience(self, now: float) -> float:
        waiting = [worker.start_at - now for worker in self._workers.values() if self._is_missing(worker)]
        return max(0.0, min([CHECK_S, *waiting]))

    def _try_to_spawn(self, worker: Worker) -> None:
        try:
            self._spawn(worker)
        except OSError as error:  # out of processes or descriptors, for the moment
            worker.drop_process()
            text = f"could not be started: {why_not_started(error, self._run_dir)}"
            if is_lacking := self._was_ready and is_lack(error):
                worker.note_shortage(text, time.monotonic(), window_s=self._config.restart_window_s)
            self._plan_restart(worker, TriptychError(f"worker {worker.role} {text}"), internal=not is_lacking)

    def _spawn(self, worker: Worker) -> None:
        if worker.role == "execute":
            worker.forget_deaths(before=time.monotonic() - self._config.restart_window_s)
            self._board.set_degraded(len(worker.deaths) > self._config.degrade_after)
        epoch = self._board.next_epoch(worker.role)
        worker.started_at = time.monotonic()
        version = self.installation.upgraded_to()
        process = worker.process = self._start_process(worker.role, arguments=["--epoch", str(epoch)])
        is_forked = isinstance(process, ForkedProcess)
        worker.version = "" if is_forked else version
        worker.pidfd = pidfd_open(process.pid)
        self._selector.register(worker.pidfd, selectors.EVENT_READ, partial(self._on_exit, worker))
        how = "forked" if is_forked else "started"
        logger.info("%s %s, epoch %d, as process %d", how, worker.role, epoch, process.pid)

    def _start_process(self, role: str, *, arguments: list[str]) -> Process:
        forked = self._forks.fork(role, arguments=arguments, stdin=self._stop_out)
        return forked or start_process(self._run_dir, role, arguments=arguments, stdin=self._stop_out, cwd=self.cwd)

    def _replace_fork_servers(self) -> None:
        """Not while a worker is starting: a recovery gets the processors for itself. Nor of another version."""
        is_possible = self._config.fork_workers and not self._stopping and self.error is None and self._all_ready()
        if is_possible and self._forks.are_due() and not self.installation.upgraded_to():
            self._forks.start()

    def _report_vacancies(self) -> None:
        """Includes workers that were killed because another one was given up."""
        for worker in self._workers.values():
            if worker.abandoned and not worker.alive and worker.role not in self._vacant:
                self._vacant.add(worker.role)
                self._board.next_epoch(worker.role)  # otherwise the board would still show the last one's phase
                self._on_vacancy(worker.role)

    def _on_exit(self, worker: Worker) -> None:
        assert worker.process is not None
        log = self.last_log_lines(worker.role)
        code = exit_code(worker.process, worker.pidfd, phase=self._board.phase(worker.role), log=log)
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        worker.process, worker.pidfd, worker.is_news = None, -1, True
        self._exit_codes[worker.role], out_of_memory = code, self._oom.has_killed(code)
        if self._is_wanted(worker):
            internal = is_internal(code, was_hung=worker.hung, out_of_memory=out_of_memory)
            if lack := what_was_lacking(code, log, was_ready=self._was_ready):
                internal = False
                worker.note_shortage(lack, time.monotonic(), window_s=self._config.restart_window_s)
            elif internal and self._was_ready:  # a failed start is reported by its error
                logger.error("the last lines of %s were:\n%s", worker.role, log)  # the next process overwrites them
            num_explained = self._on_death(Death(worker.role, code, internal, out_of_memory))
            error = worker.why_died(code, log if internal else "", out_of_memory=out_of_memory)
            self._plan_restart(worker, error, internal=internal, num_explained=num_explained)
        with self._changed:
            self._changed.notify_all()

    def _plan_restart(self, worker: Worker, error: TriptychError, *, internal: bool, num_explained: int = 0) -> None:
        """``internal``: not caused from outside (an operator, a test), which would say nothing about the worker."""
        now, delay_s = time.monotonic(), 0.0
        worker.num_restarts += 1
        if internal:
            worker.note_death(now, error, num_explained=num_explained)
            worker.forget_deaths(before=now - self._config.restart_window_s)
            if worker.is_hopeless(error, was_ready=self._was_ready, max_deaths=self._config.max_restarts):
                self._give_up(worker, error)
                return
            delay_s = 0.0 if num_explained else worker.back_off_s
        worker.start_at, worker.hung, worker.killed = max(worker.start_at, now + delay_s), False, False
        if worker.is_news:
            logger.warning("%s; restarting it in %.2f s", error.message.partition(";")[0], worker.start_at - now)

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        late_s, self._looked_at = max(0.0, now - self._looked_at - 2 * CHECK_S), now
        if late_s > FORK_S:  # it is not that a fork server does not answer
            logger.warning("this process, or the whole machine, stood still for %.1f s", late_s)
        if self._stopping:
            return
        self._oom.look()
        self._was_ready = self._was_ready or self._all_ready()
        for worker in self._workers.values():
            silent_s, patience_s = self._silence(worker)
            worker.excuse(now + min(late_s, patience_s))  # if the supervisor itself was late, who else was?
            if worker.is_hung(now, silent_s, patience_s):
                logger.warning("worker %s made no progress for %.1f s: killing it", worker.role, silent_s)
                worker.kill_hung()
            worker.note_phase(self._board.phase(worker.role), now)
            self._on_look(worker)
        self._board.set_crowded(self.crowded)

    def _silence(self, worker: Worker) -> tuple[float, float]:
        """Seconds since the worker's last sign of progress, and how many it is allowed."""
        page = self._board.worker(worker.role)
        if self._board.phase(worker.role) not in STARTING:
            # Read the patience first: after a long wait for a disk, a worker shows progress before it lowers it again.
            patience_s = max(self._config.hang_s, page.patience_ns / 1e9)
            return (time.monotonic_ns() - page.progress_ns) / 1e9, patience_s
        now = time.monotonic()
        if (stopped_s := worker.stopped_s(now)) > self._config.hang_s:
            return stopped_s, self._config.hang_s
        # During imports, loading and warm-up there is no bound on the time between two signs, only on the total.
        return now - worker.started_at, self._config.start_timeout_s

    def _kill_all(self) -> None:
        for worker in self._workers.values():
            worker.kill()

    def _give_up(self, worker: Worker | None, error: TriptychError) -> None:
        """Stop restarting this worker (None: any worker). Workers that can still inform clients go on.

        Those are prepare, to refuse requests, and summarize, to end open ones. Without summarize nothing reaches a
        client.
        """
        logger.error("giving up: %s", error.message.partition(";")[0])
        first, self.error = self.error is None, self.error or error
        is_over = worker is None or not self._was_ready or worker.role == "summarize" or not first
        for other in self._workers.values():
            other.abandoned = other.abandoned or is_over or other is worker
        if is_over:
            self._kill_all()  # before they see FAILED: summarize would end requests left by an earlier driver
        if not self._stopping:
            self._board.set_mode(FAILED)
        if first:
            self._on_give_up(error)
        with self._changed:
            self._changed.notify_all()

    def _begin_stop(self, mode: int) -> None:
        assert mode in (STOP, KEEP), f"mode {mode} does not tell the workers to stop"
        # Set again, in this thread: if a worker was given up meanwhile, FAILED would keep the others running.
        self._board.set_mode(mode)
        self._stopping = True
        os.write(self._stop_in, b"\0")
        for worker in self._workers.values():
            # It serves nobody yet, and an import or a model may keep it from noticing the stop.
            if self._board.phase(worker.role) in STARTING:
                worker.kill()
        with self._changed:
            self._changed.notify_all()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._forks.close()
        self._selector.close()
        for file in (self._bell_out, self._stop_out, self._stop_in, self.cwd):
            if file is not None:
                os.close(file)

    def _order(self, order: Callable[[], None]) -> None:
        with self._changed:
            if self._bell_in >= 0:  # a thread may replace a worker while another one stops everything
                self._orders.append(order)
                with contextlib.suppress(BrokenPipeError):  # the thread has ended: an earlier stop was interrupted
                    os.write(self._bell_in, b"\0")

    def _drain_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell_out, 4096)
