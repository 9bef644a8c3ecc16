"""Clients with keys: a request is visible only to clients with its key, and to the owner of the run directory."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.simulation.plan import MS, Action, Plan
from tests.simulation.requests import Request
from tests.simulation.users import Reader
from triptych.driver.stream import Completion, Delta
from triptych.protocol import channels, owners
from triptych.protocol import messages as m
from triptych.protocol.errors import TriptychError

if TYPE_CHECKING:
    from tests.simulation.world import World

HOUSE = "house"
KEYS = ("red", "blue")  # each of several clients
SHARE_CHANCE = 0.15  # probability that a run with keys shares requests between them
LOOK_CHANCE = 0.3  # probability that another client looks for a request, once or twice


def give_keys(plan: Plan, dice: random.Random) -> None:
    service = replace(
        plan.config.service,
        curve_keys="nowhere",
        share_requests=dice.random() < SHARE_CHANCE,
        max_client_requests=dice.choice((3, 768)),
    )
    plan.config = replace(plan.config, service=service)
    for number in range(plan.num_clients):
        plan.keys[f"client-{number}"] = dice.choice(KEYS)
        plan.keys[f"twin-of-{number}"] = dice.choice((*KEYS, HOUSE))
    for request in plan.requests:
        while dice.random() < LOOK_CHANCE:
            look = _stealing if dice.random() < 0.8 and not service.share_requests else _watching
            plan.actions.append((dice.randrange(400 * MS), look(request)))


def install_keys(patch: pytest.MonkeyPatch) -> None:
    """Keys without a handshake: the key that a client claims to have is trusted."""
    patch.setattr(channels, "start_gatekeeper", lambda *_: SimpleNamespace(stop=lambda: None))
    patch.setattr(owners, "own_keys", lambda _: SimpleNamespace(public=HOUSE))


class _Thief(Reader):
    """A client with another key: it must only learn that what it follows is unknown."""

    def on_delta(self, delta: Delta) -> None:
        self.client.world.require(False, f"{self.client.name} hears {delta} of {self.request.request_id}")

    def on_end(self, completion: Completion, error: TriptychError | None) -> None:
        self.num_ends += 1
        code = None if error is None else error.code
        self.client.world.require(code == "unknown_id", f"{self.client.name} gets {code or completion}")


def _stealing(request: Request) -> Action:
    """A client with another key follows a request, aborts and acknowledges it, and asks for its status."""

    def action(world: World) -> None:
        client = world.new_client(f"thief-of-{request.request_id}")
        session = client.session

        def steal() -> None:
            for wire_id in (request.request_id, *(choice.request_id for choice in request.choices)):
                client.readers.append(_Thief(client, request, [], ""))
                session.resume(wire_id, client.readers[-1], num_tokens=0, num_chars=0)
                session.abort(wire_id)
                session.forget(wire_id)
                session.ask(m.GetStatus(wire_id)).add_done_callback(
                    lambda future: world.require(future.result().state == "unknown", f"{client.name} sees where it is")
                )
            session.ask(m.GetRequests(100)).add_done_callback(lambda future: check_list(future.result()))

        def check_list(listed: m.Requests) -> None:
            rows: list[Any] = [*listed.rows, *listed.ended]
            world.require(not rows and not listed.num_left_out, f"{client.name} sees {rows}")

        client.at(world.clock.now_ns, steal)

    return action


def _watching(request: Request) -> Action:
    """A client that may see every request follows another client's."""

    def action(world: World) -> None:
        if request.request_id not in world.requests or not request.is_valid:
            return
        for each in request.kin:
            each.may_be_unknown = True  # whoever reads first acknowledges
        client = world.new_client(HOUSE)
        earlier = Reader(client, request, [], "")
        client.at(world.clock.now_ns, lambda: client.resume(earlier))

    return action
