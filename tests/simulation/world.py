"""One run: three workers, some clients, a network and a clock, all random numbers from one seed.

``World(seed).run()`` returns when everything is at rest, or raises ``Violation`` with the violated invariant. A seed
gives the same run on any machine.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.checks import Checks, Violation
from tests.simulation.clock import Clock, installed
from tests.simulation.drivers import Drivers
from tests.simulation.folder import offering
from tests.simulation.journal import make_board, make_journal
from tests.simulation.kinds import KINDS, draw_kinds, plan_with
from tests.simulation.network import Network
from tests.simulation.owners import install_keys
from tests.simulation.plan import FAULTS_END_NS, Plan, pausing
from tests.simulation.power import Disk
from tests.simulation.processes import RUN_DIR, Died, Process, Worker
from tests.simulation.requests import Request
from tests.simulation.retained import LastingMemory
from tests.simulation.users import Client, Reader
from triptych.driver import blame, exchange
from triptych.driver.blame import Blame
from triptych.driver.deaths import Death
from triptych.protocol.board import FAILED, KEEP, ROLES, RUN
from triptych.workers.process import StatsPublisher

RESTART_NS = (1_000_000, 80_000_000)
TURN_NS = (10_000, 200_000)  # duration of a turn
LOOK_NS = 250_000_000  # interval of the checks whether everything is at rest
REST_NS = 600_000_000  # how long it must stay at rest
LIMIT_NS = 40_000_000_000  # of simulated time: a wait longer than that counts as endless
MAX_DEPTH = 2  # maximum depth of nested turns
PAUSE_CHANCE = 0.1  # of a time in which everything stands still
WORKER_ERRORS = logging.getLogger("triptych")


class Secrets:
    """``secrets`` with the run's random numbers."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def randbits(self, count: int) -> int:
        return self._rng.getrandbits(count)


class World:
    def __init__(self, seed: int, **kinds: bool | None) -> None:
        """``kinds``: which of ``KINDS`` this run has; by default the seed decides."""
        assert kinds.keys() <= KINDS.keys(), f"kinds are {list(KINDS)}, not {list(kinds)}"
        self.seed = seed
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.log: list[str] = []
        dice, self.kinds = draw_kinds(seed, kinds)
        self.mishaps, self.rules = dice["mishaps"], dice["rules"]
        self.plan: Plan = plan_with(self.kinds, self.rng, dice)
        self.failures = random.Random(f"failures {seed}")  # independent too
        if self.failures.random() < 0.15 and not self.kinds["outages"]:
            self.plan.failure_chance = 0.08
        pause = random.Random(f"pause {seed}")
        if pause.random() < PAUSE_CHANCE:
            self.plan.actions.append((pause.randrange(FAULTS_END_NS), pausing(pause.randrange(5 * 10**8, 4 * 10**9))))
        self.config, self.card = self.plan.config, self.plan.card
        self.network = Network(self.rng, lambda: self.clock.now_ns)
        service = self.config.service
        self.journal = make_journal(service.max_records, service.arena_bytes, clock_shift_ns=self.plan.clock_shift_ns)
        self.disk = Disk(self.journal, random.Random(f"disk {seed}"))
        self.board = make_board()
        self.board.set_mode(RUN)
        self.blame = Blame(self.board, self.journal)
        self.lasting = LastingMemory(self.card) if self.plan.retains_pages else None
        self._unnoticed: dict[str, Death] = {}  # by role, those that the driver has not seen yet
        self.has_given_up = False
        self.workers: dict[str, Worker] = {}
        self.clients: list[Client] = []
        self.requests: dict[str, Request] = {}  # by id
        self.submitted_ns: dict[str, int] = {}  # when each was submitted first
        self.checks = Checks(self)
        self._heap: list[tuple[int, int, Process | None, Callable[[], None] | None]] = []
        self._order = itertools.count()
        self._depth = 0
        self._num_births = dict.fromkeys(ROLES, 0)
        self.num_deaths = 0
        self.num_chance_deaths = 0  # by a worker's own fault, caused by no request
        self.num_drivers = 1
        self.paused_until_ns = 0
        self.num_give_ups = 0
        self.folder: Any = offering(RUN_DIR, self.card)  # where no driver has one
        self.drivers = Drivers(self, random.Random(f"drivers {seed}")) if self.kinds["loading"] else None

    # -- used by all processes

    def note(self, process: Process | None, text: str) -> None:
        self.log.append(f"{self.clock.now_ns / 1e6:10.3f} ms  {process.name if process else '-':12} {text}")

    def require(self, condition: bool, text: str) -> None:
        if not condition:
            raise Violation(text)

    @property
    def may_cut_any(self) -> bool:
        """Whether an answer may end anywhere through no fault of its request."""
        return self.num_chance_deaths > 0 or self.num_give_ups > 0

    def push(self, process: Process) -> None:
        at_ns = max(process.next_ns, process.frozen_until_ns)
        heapq.heappush(self._heap, (at_ns, next(self._order), process, None))

    def call(self, at_ns: int, function: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at_ns, next(self._order), None, function))

    def check_end(self, reader: Reader, end: str) -> None:
        self.checks.end(reader, end)

    def interleave(self, process: Process) -> None:
        """Others may run between any two acts."""
        if self._depth >= MAX_DEPTH or self.rng.random() >= self.plan.interleaving:
            return
        ready = [
            other
            for other in (*self.workers.values(), *self.clients, *self._driver)
            if other.is_alive and not other.is_running and other.frozen_until_ns <= self.clock.now_ns
        ]
        if ready:
            self.clock.advance_to(self.clock.now_ns + self.rng.randrange(200_000))
            self._step(self.rng.choice(ready))

    @property
    def _driver(self) -> list[Process]:
        """If it is a simulated process."""
        return [] if self.drivers is None or not self.drivers.current.is_busy else [self.drivers.current]

    # -- the run

    def run(self) -> None:
        handler = _Alarm(self)
        WORKER_ERRORS.addHandler(handler)
        try:
            with installed(self.clock, secrets=Secrets(self.rng)), pytest.MonkeyPatch.context() as patch:
                patch.setattr(exchange, "REPEAT_S", self.plan.repeat_s)
                patch.setattr(StatsPublisher, "INTERVAL_S", 0.05)  # as when the seeds of past failures were found
                install_keys(patch)
                if self.drivers is not None:
                    self.drivers.install(patch)
                try:
                    self._begin()
                    self._loop()
                    self.checks.at_rest()
                finally:  # while exception handlers undo things that are not real
                    if self.drivers is not None:
                        self.drivers.current.end()
        except Violation as violation:
            raise Violation(self._report(str(violation))) from violation
        except Exception as error:
            raise Violation(self._report(f"a process raised {type(error).__name__}: {error}")) from error
        finally:
            WORKER_ERRORS.removeHandler(handler)

    def _report(self, text: str) -> str:
        options = " ".join(f"--{'' if value else 'no-'}{name}" for name, value in self.kinds.items())
        replay = f"python -m tests.simulation --seed {self.seed} {options}"
        return "\n".join([f"seed {self.seed}: {text}", f"(again with: {replay})", *self.log])

    def _begin(self) -> None:
        self.journal.prepare_words[:] = 6 << 32  # generations that are no other number of the journal
        if self.drivers is not None:
            self.drivers.begin()
        for role in ROLES:
            self.call(self.clock.now_ns + self.rng.randrange(20_000_000), lambda role=role: self._start_worker(role))  # type: ignore[misc]
        for at_ns, action in self.plan.actions:
            self.call(at_ns + self.clock.now_ns, lambda action=action: action(self))  # type: ignore[misc]
        for number in range(self.plan.num_clients):
            self.new_client(f"client-{number}")

    def new_client(self, name: str) -> Client:
        client = Client(self, name)
        self.clients.append(client)
        self.push(client)
        return client

    def _loop(self) -> None:
        """Run until nothing has been wanted for a while."""
        rested_ns = None
        while True:
            self.run_until(self.clock.now_ns + LOOK_NS)
            if not self.checks.is_at_rest():
                rested_ns = None
            elif rested_ns is None:
                rested_ns = self.clock.now_ns
            elif self.clock.now_ns - rested_ns > REST_NS:
                return
            self.require(self.clock.now_ns < LIMIT_NS, f"it never comes to rest: {self.checks.what_is_open()}")

    def run_until(self, until_ns: int) -> None:
        """Run other processes until then, also while a process is in the middle of something that takes so long."""
        while self._heap and self._heap[0][0] <= until_ns:
            at_ns, _, process, function = heapq.heappop(self._heap)
            self.clock.advance_to(at_ns)
            if function is not None:
                function()
            elif process is not None and process.is_alive and not process.is_running:
                due_ns = max(process.next_ns, process.frozen_until_ns)
                if due_ns == at_ns:
                    self._step(process)
                elif process.next_ns <= at_ns:
                    self.push(process)  # it was frozen meanwhile
        self.clock.advance_to(until_ns)

    def _step(self, process: Process) -> None:
        process.is_running = True
        self._depth += 1
        try:
            process.step()
        except Died:
            pass
        finally:
            process.is_running = False
            self._depth -= 1
        if process.is_alive and process.death is not None:
            self._note_death(process, is_internal=process.death.is_internal)
        if process.is_alive:
            process.next_ns = max(process.next_ns, self.clock.now_ns + self.rng.randrange(*TURN_NS))
            self.push(process)
            self.checks.after(process)

    # -- life and death

    def kill(self, process: Process) -> None:
        """Kill it from outside, now."""
        if process.is_alive:
            self.note(process, "is killed")
            self._note_death(process)

    def leave(self, worker: Worker) -> None:
        """It was told to exit."""
        self.note(worker, "leaves")
        self._note_death(worker)

    def _note_death(self, process: Process, *, is_internal: bool = False) -> None:
        process.is_alive = False
        process.close_sockets()
        if isinstance(process, Client):
            self.clients.remove(process)
            return
        assert isinstance(process, Worker), "workers and clients die"
        self.num_deaths += 1
        del self.workers[process.role]
        self._unnoticed[process.role] = Death(process.role, -signal.SIGKILL, is_internal, out_of_memory=False)
        self.call(self.clock.now_ns + self.rng.randrange(*RESTART_NS), lambda: self._start_worker(process.role))

    def _start_worker(self, role: str) -> None:
        if role in self.workers or self.board.mode == KEEP or (self.has_given_up and role == "execute"):
            return
        if self.clock.now_ns < self.paused_until_ns:  # the driver stands still, too
            self.call(self.paused_until_ns, lambda: self._start_worker(role))
            return
        if (death := self._unnoticed.pop(role, None)) is not None:
            if self.lasting is not None:
                self.lasting.note_death(death)
            self.blame.note_death(death)
        if role == "execute":
            self.board.set_degraded(self.rng.random() < 0.1)
        worker = self.workers[role] = Worker(self, role)
        self._num_births[role] += 1
        worker.planned_death = self.plan.planned_deaths.get((role, self._num_births[role]))
        worker.next_ns = self.clock.now_ns
        self.note(
            worker,
            "begins"
            if worker.planned_death is None
            else f"begins and dies after {worker.planned_death.left} {worker.planned_death.what}s",
        )
        self.push(worker)

    def drain(self) -> None:
        self.note(None, "the driver drains")
        self.board.begin_drain()

    def give_up(self) -> None:
        """execute is not started any more."""
        if self.drivers is not None and not self.drivers.has_card:
            return  # a failure before the pipeline is ready ends the start
        self.note(None, "the driver gives up")
        self.board.set_mode(FAILED)
        self.has_given_up = True
        self.num_give_ups += 1
        if "execute" in self.workers:
            self.kill(self.workers["execute"])

    def keep(self) -> None:
        """The driver stops, and leaves open requests to the next one."""
        self.note(None, "the driver stops and keeps")
        self.board.set_mode(KEEP)
        self.plan.may_drain = True  # clients that ask now are told to ask the next driver
        self.call(self.clock.now_ns + self.rng.randrange(*RESTART_NS), self.end_driver)

    def end_driver(self, *, power_fails: bool = False) -> None:
        """Its remaining workers die with it. The next driver does not see how they ended."""
        self.note(None, "the power fails" if power_fails else "the driver is replaced")
        if self.drivers is not None:
            self.drivers.current.end()
        for worker in list(self.workers.values()):
            self.kill(worker)
        self._unnoticed.clear()
        self.num_drivers += 1
        self.checks.salvage(power_fails=power_fails)
        self.board.set_mode(RUN)
        self.has_given_up = False
        self.blame = Blame(self.board, self.journal)
        self.lasting = LastingMemory(self.card) if self.plan.retains_pages else None
        if self.drivers is not None:
            self.drivers.begin()
        for role in ROLES:
            self.call(self.clock.now_ns + self.rng.randrange(*RESTART_NS), lambda role=role: self._start_worker(role))  # type: ignore[misc]


class _Alarm(logging.Handler):
    """An error logged by a worker is a fault that it caught: only planned faults are allowed here."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Died) or record.name == blame.__name__:
            return
        self._world.checks.alarms.append(f"{record.getMessage()}: {error!r}")
