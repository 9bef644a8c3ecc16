"""Questions of clients to summarize, and its answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.protocol.factories import TIMES, make_record
from tests.simulation.world import World
from tests.workers.summarize.conftest import KEY, TURN_NS, begin, begin_search, publish_tokens, turn_after
from triptych.protocol import messages as m
from triptych.protocol.codec import encode
from triptych.protocol.journal.releases import ReleaseWriter, is_released, was_read
from triptych.protocol.journal.requests import RequestWriter
from triptych.workers.process import RECEIVING_S
from triptych.workers.summarize.process import Summarize


def answers_to(body: Summarize, monkeypatch: pytest.MonkeyPatch, frame: m.Follow) -> list[Any]:
    """Its answers to this frame."""
    replies: list[Any] = []

    def deliver(_: bytes, message: Any) -> bool:
        replies.append(message)
        return True

    monkeypatch.setattr(body._router, "deliver", deliver)
    body._on_frame_safely(b"client", encode(frame))
    body.turn()
    return replies


def test_many_unknown_ids_in_one_frame_cost_one_scan_of_the_journal(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = begin(world)
    body.turn()  # the scan of its first tick
    looks: list[int] = []
    monkeypatch.setattr(body._answers, "discover", lambda: looks.append(1))
    ids = [f"r{number}" for number in range(m.MAX_FOLLOW_ENTRIES)]
    answers = answers_to(body, monkeypatch, m.Follow([[name, 0, True] for name in ids]))
    assert [(answer.request_id, answer.code) for answer in answers] == [(name, "unknown_id") for name in ids]
    assert len(looks) == 1


def test_request_accepted_between_two_frames_is_known(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    body = begin(world)
    first, second = (m.Follow([[name, 0, True]]) for name in ("nobody", "late"))
    assert len(answers_to(body, monkeypatch, first)) == 1
    RequestWriter(world.journal).accept(make_record("late"), TIMES)
    assert answers_to(body, monkeypatch, second) == []


@pytest.mark.parametrize("forgotten", [0, 1], ids=["first", "last"])
def test_partly_forgotten_request_is_unknown(world: World, monkeypatch: pytest.MonkeyPatch, forgotten: int) -> None:
    """Its choices can no longer be ranked, and a second follower would wait for ever."""
    keys, writer = begin_search(world), ReleaseWriter(world.journal)
    for key in keys:
        writer.release(*key, num_tokens=0, reason="length")
    writer.forget(*keys[forgotten])
    [answer] = answers_to(begin(world), monkeypatch, m.Follow([["b", 0, True]]))
    assert (answer.request_id, answer.code) == ("b", "unknown_id")


def test_number_of_a_choice_may_have_any_length(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python converts no more than 4300 digits to a number: the rest of the frame would not be handled either."""
    names = [f"a {'1' * 5000}", "nobody"]
    answers = answers_to(begin(world), monkeypatch, m.Follow([[name, 0, True] for name in names]))
    assert [(answer.request_id, answer.code) for answer in answers] == [(name, "unknown_id") for name in names]


def test_follow_with_too_many_entries_is_refused_with_the_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = m.Follow([["a", 0, True]] * (m.MAX_FOLLOW_ENTRIES + 1))
    [refused] = answers_to(begin(world), monkeypatch, frame)
    assert isinstance(refused, m.Rejected)
    assert (refused.code, refused.message) == ("bad_frame", "a FOLLOW has 1025 entries, the limit is 1024")


def test_continuous_questions_do_not_block_other_work(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    body = begin(world)
    received: list[bytes] = []

    def recv(peer: bytes, frame: bytes) -> None:
        received.append(frame)
        world.clock.advance_to(world.clock.now_ns + 10_000_000)

    monkeypatch.setattr(body._router, "recv", lambda: (b"client", b"frame"))
    monkeypatch.setattr(body, "_on_frame", recv)
    body.turn()
    assert 1 <= len(received) <= RECEIVING_S / 0.01 + 1


def test_disconnected_reader_is_not_retried_and_another_one_is_answered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, frame = begin(world), m.Follow([["a", 0, True]])
    body._on_frame_safely(b"nobody is called so", encode(frame))
    body._on_frame_safely(b"nobody is called so", encode(m.Abort("a")))
    body.turn()
    assert not body._delivery.pending
    [end] = answers_to(body, monkeypatch, frame)
    assert (end.request_id, end.finish_reason) == ("a", "abort")


def test_reader_gets_no_more_than_a_window_beyond_what_it_has(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.config = replace(world.config, service=replace(world.config.service, window_tokens=2))
    publish_tokens(world, *[TIMES.accepted_ns] * 6)
    body, sent = begin(world), list[tuple[int, int]]()
    for offset, again in ((0, True), (1, False), (1, False), (3, False)):
        for text in answers_to(body, monkeypatch, m.Follow([["a", offset, again]])):
            sent += [(row[1], len(row[3]) // 4) for row in text.deltas]
    assert sent == [(0, 2), (2, 1), (3, 2)]


@pytest.mark.parametrize(("is_gone", "tries"), [(False, [1, 2, 3, 4]), (True, [1])], ids=["full", "gone"])
def test_text_that_a_reader_could_not_take_is_sent_later_unless_it_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch, is_gone: bool, tries: list[int]
) -> None:
    world.config = replace(world.config, service=replace(world.config.service, window_tokens=9))
    body, num_tokens = begin(world), list[int]()

    def deliver(_: bytes, message: Any) -> bool:
        num_tokens.append(len(message.deltas[0][3]) // 4)
        if is_gone:
            raise ConnectionError
        return len(num_tokens) == 4

    monkeypatch.setattr(body._router, "deliver", deliver)
    body._on_frame_safely(b"client", encode(m.Follow([["a", 0, True]])))
    for _ in range(4):
        publish_tokens(world, world.journal.now_ns())
        turn_after(world, body, TURN_NS)
    assert num_tokens == tries


@pytest.mark.parametrize("wire_id", ["b 2", "b 02", "b x"])
def test_choice_that_does_not_exist_is_unknown(world: World, monkeypatch: pytest.MonkeyPatch, wire_id: str) -> None:
    """Or its follower would wait for ever."""
    body, keys = begin(world), accept_choices(world)
    [answer] = answers_to(body, monkeypatch, m.Follow([[wire_id, 0, True]]))
    assert (answer.request_id, answer.code) == (wire_id, "unknown_id")
    body._on_frame_safely(b"client", encode(m.Acknowledge([wire_id])))
    assert not any(was_read(world.journal, *key) for key in keys)


@pytest.mark.parametrize(
    ("wire_id", "ended"), [("b", [True, True]), ("b 1", [False, True]), ("b 2", [False, False]), ("c", [False, False])]
)
def test_abort_ends_the_choice_that_it_names_or_all(world: World, wire_id: str, ended: list[bool]) -> None:
    body, keys = begin(world), accept_choices(world, have_ended=False)
    body._on_frame_safely(b"client", encode(m.Abort(wire_id)))
    assert [is_released(world.journal, *key) for key in keys] == ended


def test_answer_is_unknown_once_its_end_is_acknowledged(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ReleaseWriter(world.journal).release(*KEY, num_tokens=0, reason="length")
    body = begin(world)
    body._on_frame_safely(b"client", encode(m.Acknowledge(["a"])))
    [answer] = answers_to(body, monkeypatch, m.Follow([["a", 0, True]]))
    assert (answer.request_id, answer.code) == ("a", "unknown_id")


def test_all_choices_are_acknowledged_by_the_id_of_their_request(world: World) -> None:
    body, keys = begin(world), accept_choices(world)
    body.turn()
    body._on_frame_safely(b"client", encode(m.Acknowledge(["b"])))
    assert all(was_read(world.journal, *key) for key in keys)


def accept_choices(world: World, *, have_ended: bool = True) -> list[tuple[int, int]]:
    """A request with two choices."""
    records = [replace(make_record(f"b {i}", n=2), index=i) for i in range(2)]
    keys = RequestWriter(world.journal).accept_all(records, TIMES)
    for key in keys if have_ended else []:
        ReleaseWriter(world.journal).release(*key, num_tokens=0, reason="length")
    return keys
