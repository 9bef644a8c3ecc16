"""Rates and times of answers that an earlier process began, or that were interrupted."""

from __future__ import annotations

import pytest

from tests.protocol.factories import TIMES
from tests.simulation.world import World
from tests.workers.summarize.conftest import KEY, TURN_NS, begin, publish_tokens, turn_after
from triptych.protocol.journal.tokens import TokenWriter

SECOND_NS = 10**9


def test_tokens_counted_by_an_earlier_process_are_not_counted_again(world: World) -> None:
    publish_tokens(world, *[TIMES.accepted_ns + i * SECOND_NS for i in range(4)])
    body = begin(world)
    assert (body._collect()["tokens"], body._collect()["tokens_per_second"]) == (0, 0.0)
    publish_tokens(world, world.journal.now_ns())
    turn_after(world, body, TURN_NS)
    assert body._collect()["tokens"] == 1


def test_rate_of_an_answer_counts_from_its_first_token_and_not_from_a_restart(world: World) -> None:
    world.clock.advance_to(10 * SECOND_NS)
    now_ns = world.journal.now_ns()
    publish_tokens(world, *[now_ns - i * SECOND_NS for i in (3, 2, 1)])
    body = begin(world)
    [answer] = body._answers.values()
    publish_tokens(world, world.journal.now_ns())
    turn_after(world, body, TURN_NS)
    assert answer.tokens_per_second == pytest.approx(3 / 3.3, rel=0.02)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_cut_off_answer_was_in_the_decode_stage_until_then(world: World, reason: str) -> None:
    """Its last token was not its end, and detokenisation did not take that long."""
    body = begin(world)
    publish_tokens(world, world.journal.now_ns())
    turn_after(world, body, SECOND_NS)
    [answer] = body._answers.values()
    world.board.worker("execute").set_phase(world.board.epoch("execute"), "ready")
    world.clock.advance_to(world.clock.now_ns + 4 * SECOND_NS)
    body._ends.end(answer, reason)
    stages_ns = answer.account(world.journal).ledger.stages_ns
    assert (stages_ns["wire"], stages_ns["detokenize"]) == (0, 0)
    assert stages_ns["decode"] == pytest.approx(5 * SECOND_NS, rel=1e-3)


@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize(
    ("cause", "is_ready"), [("preempted", True), ("recovered", True), ("recovered", False)],
    ids=["preempted", "not computed again yet", "execute is down"],
)  # fmt: skip
def test_cut_off_answer_had_lost_the_time_since_its_interruption(
    world: World, reason: str, cause: str, is_ready: bool
) -> None:
    body, began_ns = begin(world), world.journal.now_ns()
    publish_tokens(world, began_ns)
    turn_after(world, body, SECOND_NS)
    if is_ready:
        world.board.worker("execute").set_phase(world.board.epoch("execute"), "ready")
        TokenWriter(world.journal).begin_loss(KEY[0], f"{cause}_ns", began_ns + SECOND_NS)
    [answer] = body._answers.values()
    world.clock.advance_to(world.clock.now_ns + 4 * SECOND_NS)
    body._ends.end(answer, reason)
    world.clock.advance_to(world.clock.now_ns + SECOND_NS)
    ledger = answer.account(world.journal).ledger
    assert ledger.stages_ns[cause] == pytest.approx((4 if is_ready else 5) * SECOND_NS, rel=1e-3)
    assert sum(ledger.stages_ns.values()) == ledger.wall_ns
