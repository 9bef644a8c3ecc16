"""What summarize makes of the beams of a search, which are an answer only together."""

from __future__ import annotations

import pytest

from tests.protocol.factories import TIMES
from tests.simulation.world import World
from tests.workers.summarize.conftest import begin, begin_search, publish_tokens
from triptych.protocol.journal.releases import ReleaseWriter, read_end_code, read_release
from triptych.protocol.journal.tokens import TokenWriter


@pytest.mark.parametrize("index", [0, 1], ids=["first", "last"])
def test_search_ends_with_a_failed_beam_found_after_a_restart(world: World, index: int) -> None:
    """execute writes nothing more for the other beams, so followers would wait for ever."""
    keys = begin_search(world)
    TokenWriter(world.journal).finish(*keys[index], "error", "model_failed\nbad luck")
    begin(world)
    assert [read_release(world.journal, *key) for key in keys] == [(0, "error")] * 2


@pytest.mark.parametrize("index", [0, 1], ids=["first", "last"])
def test_search_ends_with_a_beam_ended_before_the_restart(world: World, index: int) -> None:
    keys = begin_search(world)
    ReleaseWriter(world.journal).release(*keys[index], num_tokens=0, reason="error", code="deadline_exceeded")
    body = begin(world)
    assert [read_end_code(world.journal, *key) for key in keys] == ["deadline_exceeded"] * 2
    search = body._requests.get("b")
    assert search is not None
    assert search.have_ended


def test_hypothesis_is_not_read_before_all_are_written(world: World) -> None:
    """If execute dies before that, the search starts over, and may find others."""
    keys = begin_search(world)
    body = begin(world)
    answers = [body._answers[slot] for slot, _ in keys]
    for key, answer in zip(keys, answers, strict=True):
        publish_tokens(world, TIMES.accepted_ns, slot=key[0])
        body._answers.catch_up(answer)
        assert answer.stream.token_ids == []
    for key, answer in zip(keys, answers, strict=True):
        TokenWriter(world.journal).finish(*key, "length")
        body._answers.catch_up(answer)
    assert [answer.stream.token_ids for answer in answers] == [[5]] * 2
