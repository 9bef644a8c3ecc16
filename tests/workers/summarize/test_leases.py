"""How long summarize keeps a request that nobody follows, and its end."""

from __future__ import annotations

import pytest

from tests.protocol.factories import make_record
from tests.simulation.world import World
from tests.workers.summarize.conftest import KEY, begin, follow, publish_tokens, turn_after
from triptych.protocol.journal.layout import UNREAD
from triptych.protocol.journal.releases import (
    is_released,
    read_release,
    release_state,
)
from triptych.protocol.journal.requests import RequestWriter
from triptych.protocol.journal.tokens import TokenWriter

LEASE_NS = int(make_record().lease_s * 1e9)


def test_request_that_is_never_followed_expires_with_its_lease(world: World) -> None:
    """It is not kept for another lease: its client may not know of it, and submits it again."""
    body = begin(world)
    turn_after(world, body, LEASE_NS // 2)
    assert not is_released(world.journal, *KEY)
    turn_after(world, body, LEASE_NS)
    assert release_state(world.journal.release_words[KEY[0]], KEY[1]) == UNREAD


def test_lease_does_not_expire_while_the_process_is_stopped(world: World) -> None:
    """As in a paused container: its clients may have been paused too, and can only come after it is resumed."""
    body = begin(world)
    turn_after(world, body, LEASE_NS // 2)
    world.clock.advance_to(world.clock.now_ns + 3 * LEASE_NS)
    body.turn()
    turn_after(world, body, LEASE_NS // 4)
    assert not is_released(world.journal, *KEY)
    turn_after(world, body, LEASE_NS // 2)
    assert is_released(world.journal, *KEY)


@pytest.mark.parametrize("was_followed", [False, True], ids=["nobody came", "followed"])
def test_repeated_acceptance_renews_the_lease(world: World, was_followed: bool) -> None:
    """ACCEPTED is a promise: a resubmitting client follows at once, and must not learn that its request is unknown."""
    body = begin(world)
    if was_followed:
        follow(body)
    turn_after(world, body, LEASE_NS * 3 // 4)
    RequestWriter(world.journal).note_told(KEY[0], world.journal.now_ns())
    turn_after(world, body, LEASE_NS * 3 // 4)
    assert not is_released(world.journal, *KEY)
    turn_after(world, body, LEASE_NS // 2)
    assert is_released(world.journal, *KEY)


def test_end_is_kept_for_one_more_lease(world: World) -> None:
    """A client that was away for a little more than its lease learns of an abort, or of an end just before it."""
    body = begin(world)
    follow(body)
    turn_after(world, body, LEASE_NS * 3 // 4)
    publish_tokens(world, world.journal.now_ns())
    TokenWriter(world.journal).finish(*KEY, "length")
    turn_after(world, body, LEASE_NS // 5)
    assert read_release(world.journal, *KEY) == (1, "length")
    turn_after(world, body, LEASE_NS // 2)
    assert list(body._answers) == [0]
    turn_after(world, body, LEASE_NS)
    assert release_state(world.journal.release_words[KEY[0]], KEY[1]) == UNREAD
