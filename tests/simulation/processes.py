"""What turns and can die at any act, and the three workers' real bodies. The clients are in ``users``."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tests.simulation.device import Device
from tests.simulation.journal import LifeIntent, LifeJournal
from tests.simulation.network import FakeSocket, FakeTransport, Network
from tests.simulation.plan import Doom
from tests.simulation.requests import PREPARE_KILLER, encoder, vocabulary
from triptych.protocol.curve import PublicDoor
from triptych.protocol.intent import Intent
from triptych.protocol.model_card import ModelCard
from triptych.workers.execute.process import Execute
from triptych.workers.prepare.process import Prepare
from triptych.workers.prepare.request import GenerationRequest
from triptych.workers.process import WorkerContext
from triptych.workers.summarize.process import Summarize

if TYPE_CHECKING:
    from tests.simulation.world import World

RUN_DIR = Path("/dev/null")  # where nothing real can be


class Died(BaseException):
    """Not an Exception, as a kill is none: nothing on the way may handle it."""

    def __init__(self, *, is_internal: bool = False) -> None:
        super().__init__()
        self.is_internal = is_internal  # by its own fault, as the driver sees it


class Process:
    """Something that turns: it runs when its time has come, does something, and says when it wants to run again.

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
        self.doom: Doom | None = None
        self.death: Died | None = None
        self.has_stored = False  # since it was last looked at

    def act(self, what: str, half: Callable[[], None] | None = None) -> None:
        """``half``: does a part of what is about to happen, for a death in the middle of it."""
        if self.death is not None:  # somebody on the way caught it nevertheless
            raise self.death
        self.world.interleave(self)
        if not self.is_alive:  # killed while it was in the middle of something
            raise Died
        if what == "store":
            self.has_stored = True
        doom = self.doom
        if doom is None or doom.what not in (what, "act"):
            return
        self.doom = doom._replace(left=doom.left - 1)
        if doom.left <= 0:
            if half is not None and self.rng.random() < 0.5:
                half()
            self.world.num_chance_deaths += doom.is_internal
            self.die(f"a {what}", is_internal=doom.is_internal)

    def die(self, of: str, *, is_internal: bool) -> NoReturn:
        self.world.note(self, f"dies at {of}{', by its own fault' if is_internal else ''}")
        self.death = Died(is_internal=is_internal)
        raise self.death

    def stay(self, duration_ns: int) -> None:
        """Be in the middle of something for so long."""
        self.world.run_until(self.world.clock.now_ns + duration_ns)
        if not self.is_alive:
            raise Died

    def stall(self) -> None:
        """Others may get the processor."""

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
    """One life of one role."""

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
            self.body = body
        else:
            return
        self.next_ns = self.world.clock.now_ns
        self.body.wait()

    def _build(self) -> Any:
        world, drivers = self.world, self.world.drivers
        run_dir, config = (world.folder, world.config) if drivers is None else drivers.find(self)
        context = LifeContext(
            self.role, self.epoch, run_dir, config, world.board, LifeJournal(world.journal, self), FakeTransport(self)
        )
        return BUILDERS[self.role](context, world.card) if drivers is None else drivers.build(self, context)

    def stall(self) -> None:
        if self.world.drivers is not None:
            self.world.drivers.stall(self)

    def die_of(self, prompt: list[int]) -> NoReturn:
        if not self.is_alive:  # it was killed while the device computed
            raise Died
        self.world.checks.killing(prompt)
        self.die(f"the prompt {prompt}", is_internal=True)


class LifeContext(WorkerContext):
    def public_door(self, endpoint: str | None) -> PublicDoor | None:
        return None if self.config.service.curve_keys is None else PublicDoor(None, "", lambda _: True)

    @property
    def intent(self) -> Intent:
        return LifeIntent(self.board.intent(self.role), _life(self))


def _life(context: WorkerContext) -> Worker:
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


def _execute(context: WorkerContext, card: ModelCard) -> Execute:
    device = Device(_life(context), card, num_host_pages=context.config.cache.host_pages)
    return Execute(context, device, card, step_s=0.001)


BUILDERS: dict[str, Callable[[WorkerContext, ModelCard], Any]] = {
    "prepare": lambda context, card: Prepare(context, card, FragileEncoder(_life(context))),  # type: ignore[arg-type]
    "execute": _execute,
    "summarize": lambda context, card: Summarize(context, card, vocabulary()),
}
