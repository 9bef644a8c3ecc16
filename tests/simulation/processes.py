"""The four kinds of processes: the three workers' real bodies and the real client session, turned by the simulation."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.simulation.journal import LifeJournal
from tests.simulation.network import FakeSocket, FakeTransport, Network
from tests.simulation.plan import Doom
from tests.simulation.requests import POISON, Request, encoder, vocabulary
from triptych.driver.session import Session
from triptych.driver.stream import Completion, Delta
from triptych.protocol.channels import Connection
from triptych.protocol.config import ModelCard
from triptych.protocol.errors import TriptychError
from triptych.protocol.messages import Accepted
from triptych.protocol.run_dir import follow_endpoint, submit_endpoint
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.hash_model import VOCAB_SIZE
from triptych.workers.execute.process import Execute
from triptych.workers.execute.step import StepInputs, StepResult
from triptych.workers.prepare.process import Prepare
from triptych.workers.process import WorkerContext
from triptych.workers.summarize.process import Summarize

if TYPE_CHECKING:
    from tests.simulation.world import World

RUN_DIR = Path("/run")


class Died(BaseException):
    """Not an Exception, as a kill is none: nothing on the way may handle it."""


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
        self.has_stored = False  # since it was last looked at

    def act(self, what: str, half: Callable[[], None] | None = None) -> None:
        """``half``: does a part of what is about to happen, for a death in the middle of it."""
        self.world.interleave(self)
        if not self.is_alive:  # killed while it was in the middle of something
            raise Died
        if what == "store":
            self.has_stored = True
        doom = self.doom
        if doom is None or doom.what not in (what, "act"):
            return
        self.doom = Doom(doom.what, doom.left - 1)
        if doom.left <= 0:
            if half is not None and self.rng.random() < 0.5:
                half()
            self.world.note(self, f"dies at a {what}")
            raise Died

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
        if self.body is None:
            self.body = self._build()
        else:
            self.body.turn()
        self.next_ns = self.world.clock.now_ns
        self.body.wait()

    def _build(self) -> Any:
        world = self.world
        context = WorkerContext(
            self.role, self.epoch, RUN_DIR, world.config, world.board, LifeJournal(world.journal, self),
            FakeTransport(self),
        )  # fmt: skip
        return BUILDERS[self.role](context, world.card)


class SlowRunner(HashRunner):
    """Steps take their time, in which everybody else goes on. One that computes ``POISON`` raises."""

    world: World

    def collect(self) -> StepResult:
        self.world.run_until(self.world.clock.now_ns + self.world.rng.randrange(*self.world.plan.step_ns))
        return super().collect()

    def launch(self, inputs: StepInputs) -> None:
        if ((inputs.token_ids == POISON) & (inputs.positions == 0)).any():
            raise RuntimeError("poison")
        super().launch(inputs)


def _execute(context: WorkerContext, card: ModelCard) -> Execute:
    host_pages = context.config.cache.host_pages
    runner = SlowRunner(
        VOCAB_SIZE, num_pages=card.num_pages, page_size=card.page_size, num_host_pages=host_pages
    )  # fmt: skip
    assert isinstance(context.transport, FakeTransport), "execute is simulated"
    runner.world = context.transport.process.world
    return Execute(context, runner, card, step_s=0.001)


BUILDERS: dict[str, Callable[[WorkerContext, ModelCard], Any]] = {
    "prepare": lambda context, card: Prepare(context, card, encoder()),
    "execute": _execute,
    "summarize": lambda context, card: Summarize(context, card, vocabulary()),
}


class Reader:
    """The listener of one request at one client: checks every piece as it comes."""

    def __init__(self, client: Client, request: Request, token_ids: list[int], text: str) -> None:
        self.client, self.request = client, request
        self.token_ids, self.text = list(token_ids), text
        self.num_ends = 0
        self.is_accepted = False
        self.error: TriptychError | None = None

    def on_accepted(self, accepted: Accepted) -> None:
        self.is_accepted = True
        self.client.world.require(self.request.is_valid, f"{self.request.request_id} is invalid and was accepted")

    def on_delta(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        self.text += delta.text
        self._check_prefix()

    def _check_prefix(self) -> None:
        require, request = self.client.world.require, self.request
        num_tokens = len(self.token_ids)
        require(
            request.token_ids[:num_tokens] == self.token_ids,
            f"{request.request_id}: tokens {self.token_ids}, expected {request.token_ids}",
        )
        require(
            request.text.startswith(self.text) or request.may_be_cut,  # half a character is then shown as U+FFFD
            f"{request.request_id}: text {self.text!r}, expected {request.text!r}",
        )

    def on_end(self, completion: Completion, error: TriptychError | None) -> None:
        self.num_ends += 1
        self.error = error
        world, request = self.client.world, self.request
        end = error.code if error is not None else completion.finish_reason
        world.note(self.client, f"{request.request_id} ends with {end} after {len(self.token_ids)} tokens")
        world.require(self.num_ends == 1, f"{request.request_id} ends again, now with {end}")
        world.check_end(self, end)
        if (then := request.then) is not None and then.request_id not in world.requests:
            self.client.submit(then)


class Client(Process):
    """A client's session, and what its user does and when."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        service = world.config.service
        doors = submit_endpoint(RUN_DIR, service), follow_endpoint(RUN_DIR, service)
        self.session = Session(Connection(*doors, transport=FakeTransport(self)))
        self.readers: list[Reader] = []
        self.deeds: deque[tuple[int, Callable[[], None]]] = deque()  # what the user does, in order of time

    def at(self, at_ns: int, deed: Callable[[], None]) -> None:
        self.deeds.append((at_ns, deed))
        self.deeds = deque(sorted(self.deeds, key=lambda item: item[0]))
        self.wake(at_ns)

    def step(self) -> None:
        while self.deeds and self.deeds[0][0] <= self.world.clock.now_ns:
            self.deeds.popleft()[1]()
        self.session.turn()
        if self.deeds:
            self.next_ns = min(self.next_ns, self.deeds[0][0])

    def submit(self, request: Request) -> None:
        self.world.note(self, f"submits {request.request_id}: {request.wire}")
        self.world.requests[request.request_id] = request
        reader = Reader(self, request, [], "")
        self.readers.append(reader)
        self.session.submit(request.request_id, request.wire, reader)

    def resume(self, earlier: Reader) -> None:
        request = earlier.request
        self.world.note(self, f"resumes {request.request_id} at {len(earlier.token_ids)} tokens")
        reader = Reader(self, request, earlier.token_ids, earlier.text)
        reader.is_accepted = True
        self.readers.append(reader)
        self.session.resume(
            request.request_id, reader, num_tokens=len(earlier.token_ids), num_chars=len(earlier.text)
        )  # fmt: skip

    def abort(self, request: Request) -> None:
        self.world.note(self, f"aborts {request.request_id}")
        request.may_abort = True
        self.session.abort(request.request_id)

    @property
    def is_waiting(self) -> bool:
        return bool(self.deeds) or any(not reader.num_ends for reader in self.readers)
