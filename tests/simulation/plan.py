"""The plan of one run, drawn before it begins: sizes, requests, actions of users, and faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.simulation.groups import make_group
from tests.simulation.requests import Request, random_request
from triptych.protocol.board import ROLES
from triptych.protocol.config import CacheConfig, ModelConfig, PipelineConfig, SchedulerConfig, ServiceConfig
from triptych.protocol.model_card import ModelCard
from triptych.workers.execute.hash_build import VOCAB_SIZE

if TYPE_CHECKING:
    from tests.simulation.users import Client, Reader
    from tests.simulation.world import World

MS = 1_000_000
FAULTS_END_NS = 500 * MS
STEPS_NS = ((MS // 5, 3 * MS), (MS // 5, 3 * MS), (5 * MS, 60 * MS))
Action = Callable[["World"], None]


class PlannedDeath(NamedTuple):
    """When a process dies."""

    what: str  # "act", or "store" to count only these
    left: int
    is_internal: bool = False  # whether it looks to the driver like the worker's own fault


@dataclass
class Plan:
    config: PipelineConfig
    card: ModelCard
    num_clients: int
    repeat_s: float  # interval after which a client repeats a message
    interleaving: float  # probability that others run between two acts
    step_ns: tuple[int, int]  # how long a step takes
    actions: list[tuple[int, Action]] = field(default_factory=list)  # (ns after the beginning, action)
    requests: list[Request] = field(default_factory=list)
    planned_deaths: dict[tuple[str, int], PlannedDeath] = field(default_factory=dict)  # (role, number of its start)
    may_drain: bool = False
    is_batch_invariant: bool = True  # as the runner reports
    clock_shift_ns: int = 0  # the journal's clock is ahead by this
    failure_chance: float = 0.0  # probability that a token cannot be sampled
    mishap_chance: float = 0.0  # probability that a step raises
    has_draft_model: bool = False  # whether tokens are proposed by one
    retains_pages: bool = False  # whether pages outlive execute
    keys: dict[str, str] = field(default_factory=dict)  # of clients, by their names; by default the name

    @property
    def overlaps(self) -> bool:
        """Whether execute plans and launches a step while the last one runs."""
        return self.card.device != "cpu"


def make_plan(rng: random.Random, *, overlaps: bool, groups: random.Random | None) -> Plan:
    """``groups``: random numbers that give some requests several sequences, if any; ``rng`` is independent of them."""
    config = _config(rng)
    plan = Plan(config, _card(config, overlaps=overlaps), rng.randrange(1, 4), **_speeds(rng))
    plan.is_batch_invariant = rng.random() < 0.5
    plan.clock_shift_ns = rng.choice((0, 10**15))
    _plan_requests(rng, plan, groups)
    _plan_faults(rng, plan)
    return plan


def _speeds(rng: random.Random) -> dict[str, Any]:
    return {
        "repeat_s": rng.choice((0.25, 0.25, 0.03)),
        "interleaving": rng.choice((0.0, 0.002, 0.02)),
        "step_ns": rng.choice(STEPS_NS),
    }


def _config(rng: random.Random) -> PipelineConfig:
    cache = CacheConfig(
        page_size=4,
        num_pages=rng.randrange(5, 18),
        host_pages=rng.choice((0, 0, 8)),
        prefix_cache=rng.random() < 0.7,
    )
    scheduler = SchedulerConfig(
        max_num_seqs=rng.randrange(1, 5),
        prefill_chunk=rng.choice((3, 8, 32)),
        policy=rng.choice(("fifo", "fifo", "prefill_first", "round_robin", "priority")),
        preemption=rng.choice(("auto", "recompute", "swap")),
        recovery=rng.choice(("auto", "exact", "fast")),
    )
    service = ServiceConfig(
        max_queue=rng.choice((2, 16, 16)),
        window_tokens=rng.choice((2, 256)),
        report_interval_ms=10.0,
        lease_s=rng.choice((0.6, 1.5)),
        max_records=rng.randrange(3, 14),
        arena_bytes=1 << 16,
    )
    return PipelineConfig(model=ModelConfig(model="hash-lm"), cache=cache, scheduler=scheduler, service=service)


def _card(config: PipelineConfig, *, overlaps: bool) -> ModelCard:
    num_pages = config.cache.num_pages
    assert num_pages is not None, "every run sets num_pages"
    return ModelCard(
        model="hash-lm", model_type="hash-lm", backend="hash", num_parameters=0, dtype="int64",
        device="cuda" if overlaps else "cpu", vocab_size=VOCAB_SIZE, max_model_len=min(40, num_pages * 4),
        eos_token_ids=(0,), page_size=4, num_pages=num_pages, max_num_seqs=config.scheduler.num_rows,
        max_live=config.scheduler.max_live, load_s=0.0,
    )  # fmt: skip


def _plan_requests(rng: random.Random, plan: Plan, groups: random.Random | None) -> None:
    common = [rng.randrange(1, VOCAB_SIZE - 1) for _ in range(9)]
    until_ns = rng.choice((5 * MS, 150 * MS))
    for number in range(rng.randrange(2, 8)):
        request = random_request(rng, f"r{number}", plan.card, common=common)
        if rng.random() < 0.4:
            request.then = random_request(rng, f"r{number}+", plan.card, common=common)
        plan.requests += [each for each in (request, request.then) if each is not None]
        who, at_ns = rng.randrange(plan.num_clients), rng.randrange(until_ns)
        plan.actions.append((at_ns, submitting(who, request)))
        chance = rng.random()
        if chance < 0.2:
            plan.actions.append((at_ns + rng.randrange(60 * MS), _aborting(who, request)))
        elif chance < 0.27:
            plan.actions.append((at_ns + rng.randrange(60 * MS), _submitting_elsewhere(who, request)))
        if groups is not None:
            _plan_groups(groups, plan, request)
            if request.choices and groups.random() < 0.3:
                choice = groups.choice(request.choices)
                plan.actions.append((at_ns + groups.randrange(60 * MS), _aborting(who, choice)))


def _plan_groups(dice: random.Random, plan: Plan, request: Request) -> None:
    for each in (request, request.then):
        if each is not None and dice.random() < 0.5:
            make_group(dice, each, plan.card, max_records=plan.config.service.max_records)


def _plan_faults(rng: random.Random, plan: Plan) -> None:
    for _ in range(rng.choice((0, 1, 2, 3, 5))):
        plan.actions.append((rng.randrange(FAULTS_END_NS), _random_fault(rng, plan)))
    for role in ROLES:
        for life in range(1, 4):  # the second and third: during a recovery
            if rng.random() < 0.3:
                plan.planned_deaths[(role, life)] = _random_death(rng)


def _random_death(rng: random.Random) -> PlannedDeath:
    left = rng.choice((rng.randrange(20), rng.randrange(400)))
    planned_death = rng.choice((PlannedDeath("store", rng.randrange(80)), PlannedDeath("act", left)))
    return planned_death._replace(is_internal=rng.random() < 0.1)


def _random_fault(rng: random.Random, plan: Plan) -> Action:
    kind = rng.randrange(11)
    role, client = rng.choice(ROLES), rng.randrange(plan.num_clients)
    if kind <= 1:
        return lambda world: _kill(world, role)
    if kind == 2:
        return lambda world: world.end_driver()
    if kind == 3:
        return _freezing(role, rng.randrange(400 * MS))
    if kind == 4:
        return _cut
    if kind == 5:
        return _stalling(client, rng.choice((rng.randrange(300 * MS), 4000 * MS)))
    if kind == 6:
        return _vanishing(client, returns=rng.choice(("not", "resumes", "submits")))
    if kind == 7 and rng.random() < 0.3:
        plan.may_drain = True
        return lambda world: world.drain()
    if kind == 8 and rng.random() < 0.2:
        return lambda world: world.give_up()
    if kind == 9:
        return lambda world: world.keep()
    planned_death = _random_death(rng)
    return lambda world: _plan_death(world, role, planned_death)


# -- users


def submitting(who: int, request: Request) -> Action:
    def action(world: World) -> None:
        if (client := _client(world, who)) is not None:
            client.at(world.clock.now_ns, lambda: client.submit(request))

    return action


def _aborting(who: int, request: Request) -> Action:
    def action(world: World) -> None:
        if (client := _client(world, who)) is not None:
            client.at(world.clock.now_ns, lambda: client.abort(request))

    return action


def _submitting_elsewhere(who: int, request: Request) -> Action:
    """The same request again, from another client, while the first one still waits for it."""

    def action(world: World) -> None:
        for each in request.kin:
            each.may_be_unknown = True  # whoever reads first acknowledges
        other = world.new_client(f"twin-of-{who}")
        other.at(world.clock.now_ns, lambda: other.submit(request))

    return action


def _client(world: World, who: int) -> Client | None:
    return next((client for client in world.clients if client.name == f"client-{who}"), None)


# -- faults


def _kill(world: World, role: str) -> None:
    if role in world.workers:
        world.kill(world.workers[role])


def _plan_death(world: World, role: str, planned_death: PlannedDeath) -> None:
    if role in world.workers:
        world.workers[role].planned_death = planned_death


def _freezing(role: str, duration_ns: int) -> Action:
    def action(world: World) -> None:
        if role in world.workers:
            world.note(world.workers[role], f"freezes for {duration_ns // MS} ms")
            world.workers[role].frozen_until_ns = max(world.clock.now_ns + duration_ns, world.paused_until_ns)

    return action


def pausing(duration_ns: int) -> Action:
    """Everything stands still, as in a container that is paused."""

    def action(world: World) -> None:
        world.note(None, f"everything is paused for {duration_ns // MS} ms")
        world.paused_until_ns = world.clock.now_ns + duration_ns
        for process in (*world.workers.values(), *world.clients):
            process.frozen_until_ns = max(process.frozen_until_ns, world.paused_until_ns)

    return action


def _cut(world: World) -> None:
    connections = [s.connection for s in world.network.connecting if s.connection is not None]
    if connections:
        connection = world.rng.choice(connections)
        world.note(connection.client.process, f"loses its connection to {connection.server.endpoint}")
        world.network.drop(connection, dead=None)


def _stalling(who: int, duration_ns: int) -> Action:
    def action(world: World) -> None:
        if (client := _client(world, who)) is not None:
            world.note(client, f"stalls for {duration_ns // MS} ms")
            client.frozen_until_ns = max(world.clock.now_ns + duration_ns, world.paused_until_ns)
            if duration_ns > world.config.service.lease_s * 1e9 / 3:
                for reader in client.readers:
                    leave_alone(reader)

    return action


def leave_alone(reader: Reader) -> None:
    """No one follows it for as long as its lease."""
    for each in reader.request.kin:
        each.may_abort = each.may_be_unknown = True


def _vanishing(who: int, *, returns: str) -> Action:
    def action(world: World) -> None:
        client = _client(world, who)
        if client is None:
            return
        for reader in client.readers:
            leave_alone(reader)
        world.kill(client)
        if returns != "not":
            again = world.new_client(f"client-{who}")
            for reader in client.readers:
                if not reader.num_ends:
                    take_up(again, reader, by_submitting=returns == "submits" or not reader.is_accepted)

    return action


def take_up(client: Client, reader: Reader, *, by_submitting: bool) -> None:
    at_ns = client.world.clock.now_ns + client.rng.randrange(300 * MS)
    client.at(at_ns, (lambda: client.submit(reader.request)) if by_submitting else (lambda: client.resume(reader)))
