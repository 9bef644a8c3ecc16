"""The clients: the real session, the actions of its user, and a listener that checks every piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.embeddings import check_embedding
from tests.simulation.ledgers import check_ledger
from tests.simulation.network import FakeTransport
from tests.simulation.processes import RUN_DIR, Process
from tests.simulation.requests import Request
from tests.simulation.scores import check_logprobs
from triptych.driver.session import Session
from triptych.driver.stream import Completion, Delta
from triptych.protocol.connection import Address, Connection
from triptych.protocol.errors import TriptychError
from triptych.protocol.messages import Accepted
from triptych.protocol.run_dir import follow_endpoint, submit_endpoint

if TYPE_CHECKING:
    from tests.simulation.world import World


class Reader:
    """The listener of one request, or choice, at one client: it checks every piece as it arrives."""

    def __init__(self, client: Client, request: Request, token_ids: list[int], text: str) -> None:
        self.client, self.request = client, request
        self.token_ids, self.text = list(token_ids), text
        self.began_ns = client.world.clock.now_ns
        self.num_ends = 0
        self.is_accepted = self.has_resumed = False
        self.error: TriptychError | None = None
        self.choices = [Reader(client, choice, [], "") for choice in request.choices]  # listened to together

    @property
    def expected(self) -> list[Request]:
        """The requests whose answer it may get: if candidates may be cut, any of them may turn out to be the best."""
        request = self.request
        is_open = request.candidates and (request.may_be_cut or self.client.world.may_cut_any)
        return request.candidates if is_open else [request]

    def on_accepted(self, accepted: Accepted) -> None:
        self.is_accepted = True
        self.client.world.require(self.request.is_valid, f"{self.request.request_id} is invalid and was accepted")

    def on_delta(self, delta: Delta) -> None:
        if self.choices:
            return
        self.token_ids += delta.token_ids
        self.text += delta.text
        self._check_prefix()

    def _check_prefix(self) -> None:
        world, request = self.client.world, self.request
        require = world.require
        num_tokens, expected = len(self.token_ids), self.expected
        require(
            any(each.token_ids[:num_tokens] == self.token_ids for each in expected),
            f"{request.request_id}: tokens {self.token_ids}, expected {[each.token_ids for each in expected]}",
        )
        require(
            # If an answer is cut, half a character is shown as U+FFFD.
            any(each.text.startswith(self.text) for each in expected) or request.may_be_cut or world.may_cut_any,
            f"{request.request_id}: text {self.text!r}, expected {[each.text for each in expected]}",
        )

    def on_end(self, completion: Completion, error: TriptychError | None) -> None:
        self.num_ends += 1
        self.error = error
        world, request = self.client.world, self.request
        end = error.code if error is not None else completion.finish_reason
        world.note(self.client, f"{request.request_id} ends with {end} after {len(self.token_ids)} tokens")
        world.require(self.num_ends == 1, f"{request.request_id} ends again, now with {end}")
        if not self.choices:
            world.check_end(self, end)
        if error is None:
            check_logprobs(self, completion)
            check_embedding(self, completion)
            check_ledger(self, completion)
        if (then := request.then) is not None and then.request_id not in world.requests:
            self.client.submit(then)


class Client(Process):
    """A client's session, and the actions of its user."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.key = world.plan.keys.get(name, name)
        service = world.config.service
        endpoints = submit_endpoint(RUN_DIR, service), follow_endpoint(RUN_DIR, service)
        self.session = Session(Connection(Address(*endpoints), transport=FakeTransport(self)))
        self.readers: list[Reader] = []
        self.actions: deque[tuple[int, Callable[[], None]]] = deque()  # the user's actions, in order of time

    def at(self, at_ns: int, action: Callable[[], None]) -> None:
        self.actions.append((at_ns, action))
        self.actions = deque(sorted(self.actions, key=lambda item: item[0]))
        self.wake(at_ns)

    def step(self) -> None:
        while self.actions and self.actions[0][0] <= self.world.clock.now_ns:
            self.actions.popleft()[1]()
        self.session.turn()
        if self.actions:
            self.next_ns = min(self.next_ns, self.actions[0][0])

    def submit(self, request: Request) -> None:
        self.world.note(self, f"submits {request.request_id}: {request.wire}")
        self.world.requests |= {each.request_id: each for each in (request, *request.sequences)}
        self.world.submitted_ns.setdefault(request.request_id, self.world.clock.now_ns)
        reader = Reader(self, request, [], "")
        self.readers.append(reader)
        self.session.submit(request.request_id, request.wire, reader, reader.choices)

    def resume(self, earlier: Reader) -> None:
        request = earlier.request
        self.world.note(self, f"resumes {request.request_id} at {len(earlier.token_ids)} tokens")
        reader = Reader(self, request, earlier.token_ids, earlier.text)
        self.readers.append(reader)
        for each in (reader, *reader.choices):
            each.is_accepted = each.has_resumed = True
        if reader.choices:  # from their beginning
            self.session.resume_all(request.request_id, reader, reader.choices)
            return
        self.session.resume(
            request.request_id, reader, num_tokens=len(earlier.token_ids), num_chars=len(earlier.text)
        )  # fmt: skip

    def abort(self, request: Request) -> None:
        self.world.note(self, f"aborts {request.request_id}")
        for each in request.kin:
            each.may_abort = True
        self.session.abort(request.request_id)

    @property
    def is_waiting(self) -> bool:
        return bool(self.actions) or any(not reader.num_ends for reader in self.readers)
