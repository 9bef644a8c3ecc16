"""Simulated processes that take turns and can die at any act, and the workers' real bodies. The clients are in
``users``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tests.simulation.device import Device
from tests.simulation.forms import compile_forms
from tests.simulation.journal import ProcessIntent, ProcessJournal
from tests.simulation.network import FakeSocket, FakeTransport, Network
from tests.simulation.plan import PlannedDeath
from tests.simulation.requests import PREPARE_KILLER, encoder, vocabulary
from triptych.protocol.curve import CurveServer
from triptych.protocol.intent import Intent
from triptych.protocol.model_card import ModelCard
from triptych.workers.execute.process import Execute
from triptych.workers.prepare.process import Prepare
from triptych.workers.prepare.request import GenerationRequest
from triptych.workers.process import WorkerContext
from triptych.workers.summarize.process import Summarize

if TYPE_CHECKING:
    from tests.simulation.world import World

RUN_DIR = Path("/dev/null")  # a path that does not exist


class Died(BaseException):
    """Derived from BaseException: like a kill, it must not be caught by any handler on the way."""

    def __init__(self, *, is_internal: bool = False) -> None:
        super().__init__()
        self.is_internal = is_internal  # by its own fault, as the driver sees it


class Process:
    """A process that takes turns: it runs when its time has come, and then says when it wants to run again.

    Everything it does that others can see is an act: each store into the journal, each frame sent or received. It can
    be killed before any of them, and others may run in between.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.network: Network = world.network
        self.rng: random.Random = world.rng
        self.sockets: list[FakeSocket] = []
        self.next_ns = 0
        self.frozen_until_ns = 0
        self.is_alive = True
        self.is_running = False
        self.planned_death: PlannedDeath | None = None
        self.death: Died | None = None
        self.has_stored = False  # since the last check

    def act(self, what: str, half: Callable[[], None] | None = None) -> None:
        """``half`` does a part of the act, for a death in the middle of it."""
        if self.death is not None:  # code on the way caught it nevertheless
            raise self.death
        self.world.interleave(self)
        if not self.is_alive:  # killed while it was in the middle of something
            raise Died
        if what == "store":
            self.has_stored = True
        planned_death = self.planned_death
        if planned_death is None or planned_death.what not in (what, "act"):
            return
        self.planned_death = planned_death._replace(left=planned_death.left - 1)
        if planned_death.left <= 0:
            if half is not None and self.rng.random() < 0.5:
                half()
            self.world.num_chance_deaths += planned_death.is_internal
            self.die(f"a {what}", is_internal=planned_death.is_internal)

    def die(self, of: str, *, is_internal: bool) -> NoReturn:
        self.world.note(self, f"dies at {of}{', by its own fault' if is_internal else ''}")
        self.death = Died(is_internal=is_internal)
        raise self.death

    def stay(self, duration_ns: int) -> None:
        """Be in the middle of something for this long."""
        self.world.run_until(self.world.clock.now_ns + duration_ns)
        self.go_on()

    def go_on(self) -> None:
        """Unless it was killed while others ran."""
        if not self.is_alive:
            raise Died

    def stall(self) -> None:
        """Let others get the processor."""

    def wake(self, at_ns: int) -> None:
        if at_ns < self.next_ns and not self.is_running:
            self.next_ns = at_ns
            self.world.push(self)

    def step(self) -> None:
        raise NotImplementedError

    def close_sockets(self) -> None:
        for socket in self.sockets:
            socket.close()
        self.sockets.clear()


class Worker(Process):
    """One process of one role."""

    def __init__(self, world: World, role: str) -> None:
        self.role = role
        self.epoch = world.board.next_epoch(role)
        super().__init__(world, f"{role}.{self.epoch}")
        self.body: Any = None

    def step(self) -> None:
        if self.body is not None and self.body._context.stopping:
            self.world.leave(self)
            return
        if self.body is not None:
            self.body.turn()
        elif (body := self._build()) is not None:
            self.body = compile_forms(self, body)
        else:
            return
        self.next_ns = self.world.clock.now_ns
        self.body.wait()

    def _build(self) -> Any:
        world, drivers = self.world, self.world.drivers
        run_dir, config = (world.folder, world.config) if drivers is None else drivers.find(self)
        context = SimulatedContext(
            self.role,
            self.epoch,
            run_dir,
            config,
            world.board,
            ProcessJournal(world.journal, self),
            FakeTransport(self),
        )
        if drivers is not None:
            return drivers.build(self, context)
        body = BUILDERS[self.role](context, world.card)
        context.page.set_phase(self.epoch, "ready")
        return body

    def stall(self) -> None:
        if self.world.drivers is not None:
            self.world.drivers.stall(self)

    def die_of(self, prompt: list[int]) -> NoReturn:
        self.go_on()  # the device has computed meanwhile
        self.world.checks.killing(prompt)
        self.die(f"the prompt {prompt}", is_internal=True)


class SimulatedContext(WorkerContext):
    def curve_server(self, endpoint: str | None) -> CurveServer | None:
        return None if self.config.service.curve_keys is None else CurveServer(None, "", lambda _: True)

    @property
    def intent(self) -> Intent:
        return ProcessIntent(self.board.intent(self.role), _fields(self))


def _fields(context: WorkerContext) -> Worker:
    assert isinstance(context.transport, FakeTransport), "workers are simulated"
    assert isinstance(context.transport.process, Worker), "workers have contexts"
    return context.transport.process


class FragileEncoder:
    """The real encoder, until ``PREPARE_KILLER`` comes."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def encode_request(self, request: GenerationRequest) -> Any:
        assert request.prompt_token_ids is not None, "clients send ids"
        if request.prompt_token_ids[0] == PREPARE_KILLER:
            self._worker.die_of(request.prompt_token_ids.tolist())
        return encoder().encode_request(request)

    def is_continued(self, request: GenerationRequest, prompt: Any) -> bool:
        return encoder().is_continued(request, prompt)


def _execute(context: WorkerContext, card: ModelCard) -> Execute:
    device = Device(_fields(context), card, num_host_pages=context.config.cache.host_pages)
    return Execute(context, device, card, step_s=0.001)


BUILDERS: dict[str, Callable[[WorkerContext, ModelCard], Any]] = {
    "prepare": lambda context, card: Prepare(context, card, FragileEncoder(_fields(context))),  # type: ignore[arg-type]
    "execute": _execute,
    "summarize": lambda context, card: Summarize(context, card, vocabulary()),
}
