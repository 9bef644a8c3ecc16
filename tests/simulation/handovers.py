"""Requests that change hands: others resume or abort what a client submitted, or it looks away and comes back."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.simulation.plan import FAULTS_END_NS, Plan, leave_alone, take_up

if TYPE_CHECKING:
    from tests.simulation.users import Client, Reader
    from tests.simulation.world import World

KINDS = ("resume", "abort", "detach")


def hand_over(plan: Plan, dice: random.Random) -> None:
    for _ in range(dice.randrange(1, 5)):
        kind, at_ns = dice.choice(KINDS), dice.choice((FAULTS_END_NS // 10, FAULTS_END_NS))
        plan.actions.append((dice.randrange(at_ns), lambda world, kind=kind: _hand_over(world, kind, dice)))  # type: ignore[misc]


def _hand_over(world: World, kind: str, dice: random.Random) -> None:
    """Of a request that is accepted and has not ended."""
    open_readers = [
        reader
        for client in world.clients
        for reader in client.readers
        if reader.is_accepted and not reader.num_ends and not any(choice.num_ends for choice in reader.choices)
    ]
    if open_readers:
        reader = dice.choice(open_readers)
        {"resume": _resume, "abort": _abort, "detach": _detach}[kind](world, reader)


def _resume(world: World, reader: Reader) -> None:
    """Both follow it, until one of them has read it."""
    for each in reader.request.kin:
        each.may_be_unknown = True
    take_up(_other(world, reader), reader, by_submitting=False)


def _abort(world: World, reader: Reader) -> None:
    other = _other(world, reader)
    other.at(world.clock.now_ns, lambda: other.abort(reader.request))


def _detach(world: World, reader: Reader) -> None:
    """It may come back too late."""
    client = reader.client
    world.note(client, f"looks away from {reader.request.request_id}")
    leave_alone(reader)
    client.readers.remove(reader)
    client.at(world.clock.now_ns, lambda: client.session.detach(reader.request.request_id))
    take_up(client, reader, by_submitting=False)


def _other(world: World, reader: Reader) -> Client:
    name = f"heir-{len(world.clients)}-of-{reader.client.name}"
    world.plan.keys[name] = reader.client.key
    return world.new_client(name)
