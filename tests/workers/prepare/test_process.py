"""What prepare does with a frame from any client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cards import CARD
from tests.protocol.factories import TIMES, make_journal, make_record
from tests.simulation.clock import installed
from tests.simulation.processes import Worker
from tests.simulation.world import World
from triptych.protocol import messages as m
from triptych.protocol.board import Board
from triptych.protocol.codec import Frame, content_key, decode, decode_public, encode
from triptych.protocol.config import PipelineConfig
from triptych.protocol.errors import InvalidRequest
from triptych.protocol.journal.deaths import POISONED
from triptych.protocol.journal.layout import ACCEPTED, DISPATCHED
from triptych.protocol.journal.releases import ReleaseWriter
from triptych.protocol.journal.requests import RequestWriter, read_request
from triptych.protocol.owners import HOUSE
from triptych.workers.prepare import process
from triptych.workers.prepare.admission import Admission
from triptych.workers.prepare.process import Prepare
from triptych.workers.process import RECEIVING_S, TICK_S, WorkerContext

FRAME = encode(m.Submit("a", {"prompt_token_ids": [1, 2, 3], "max_tokens": 1}))
KEY = content_key(FRAME)


@pytest.fixture
def world() -> Iterator[World]:
    world = World(0)
    with installed(world.clock):
        yield world


def make_prepare(world: World) -> Prepare:
    prepare = Worker(world, "prepare")._build()
    assert isinstance(prepare, Prepare)
    return prepare


@pytest.mark.parametrize(
    ("model", "is_known", "expected"),
    [("demo", False, ["demo"]), ("demo", True, []), ("hash-lm", False, [])],
    ids=["while execute loads", "after a crash", "execute is as fast"],
)
def test_what_the_first_chat_needs_is_imported_while_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, is_known: bool, expected: list[str]
) -> None:
    imported: list[str] = []
    monkeypatch.setattr(process, "preload", lambda config: imported.append(config.model.model))
    monkeypatch.setattr(process, "wait_for_model", lambda *_: None)
    if is_known:
        CARD.publish(tmp_path)
    config = PipelineConfig.from_options(model=model)
    process.run(WorkerContext("prepare", 1, tmp_path, config, Board(tmp_path / "board"), make_journal(tmp_path)))
    assert imported == expected


def intents_while_reading(world: World, patch: pytest.MonkeyPatch) -> list[list[int]]:
    """The intents written each time before a frame is read."""
    intents: list[list[int]] = []

    def read(frame: bytes, *, max_bytes: int) -> Frame:
        intents.append(world.board.intent("prepare").read())
        return decode_public(frame, max_bytes=max_bytes)

    patch.setattr(process, "decode_public", read)
    return intents


def test_intent_is_written_before_a_frame_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    intents, prepare = intents_while_reading(world, monkeypatch), make_prepare(world)
    prepare._on_frame_alone(b"peer", FRAME)
    assert intents == [[KEY]]
    assert world.board.intent("prepare").read() == []


def test_frame_that_crashed_prepare_twice_is_not_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    intents, prepare = intents_while_reading(world, monkeypatch), make_prepare(world)
    world.board.set_suspect(KEY, POISONED)
    prepare._on_frame_alone(b"peer", FRAME)
    assert intents == []
    assert prepare._num_rejected["poisoned"] == 1


def test_frame_that_has_to_wait_is_not_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a suspect must be alone. Its client sends it again."""
    intents, prepare = intents_while_reading(world, monkeypatch), make_prepare(world)
    monkeypatch.setattr(prepare._tokenizing, "has_to_wait", lambda key: True)
    prepare._on_frame_alone(b"peer", FRAME)
    assert (intents, prepare._num_rejected) == ([], {})


def test_bad_frame_is_refused_once(world: World) -> None:
    prepare = make_prepare(world)
    prepare._on_frame_alone(b"peer", b"no frame")
    assert prepare._num_rejected == {"bad_frame": 1}


def test_suspected_frame_that_causes_no_crash_is_cleared(world: World) -> None:
    world.board.set_suspect(KEY, 1)
    make_prepare(world)._on_frame_alone(b"peer", FRAME)
    assert world.board.suspects() == {}


def test_each_received_frame_is_progress(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, marks = make_prepare(world), list[bool]()
    frames = iter([(b"peer", FRAME)] * 3)
    monkeypatch.setattr(prepare._router, "recv", lambda: next(frames, None))
    monkeypatch.setattr(prepare, "_on_frame_alone", lambda *_: marks.append(False))
    monkeypatch.setattr(prepare._context.page, "progress", lambda: marks.append(True))
    prepare.turn()
    assert marks == [False, True] * 3


def test_continuous_questions_do_not_block_other_work(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each frame may take a second; without a limit, credits would not come back and other clients would wait."""
    prepare, received = make_prepare(world), list[bytes]()

    def recv(_: bytes, frame: bytes) -> None:
        received.append(frame)
        world.clock.advance_to(world.clock.now_ns + 10_000_000)

    monkeypatch.setattr(prepare._router, "recv", lambda: (b"peer", FRAME))
    monkeypatch.setattr(prepare, "_on_frame_alone", recv)
    prepare.turn()
    assert 1 <= len(received) <= RECEIVING_S / 0.01 + 1


def test_request_beyond_the_quota_is_not_decoded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding megabytes takes long, and a client beyond its quota could send them without end."""
    prepare, answers = make_prepare(world), list[m.Rejected]()
    monkeypatch.setattr(prepare._router, "send", lambda _, message: answers.append(message))
    prepare._quotas.waits(b"peer", world.config.service.max_client_bytes)
    prepare._on_frame_alone(b"peer", encode(m.Submit("a", {"messages": "no list", "max_tokens": 1})))
    prepare._on_frame_alone(b"peer", encode(m.Submit("b", {"prompt_token_ids": "no list"})))
    assert [(answer.request_id, answer.code) for answer in answers] == [("a", "overloaded"), ("b", "invalid_request")]


def test_open_requests_of_a_key_count_after_a_restart(world: World) -> None:
    writer = RequestWriter(world.journal)
    records = [replace(make_record(name), owner=owner) for name, owner in (("a", 7), ("b", 7), ("c", HOUSE))]
    ended, *_ = [writer.accept(record, TIMES) for record in records]
    ReleaseWriter(world.journal).release(*ended, num_tokens=0, reason="abort")
    quotas = make_prepare(world)._quotas
    assert (quotas._requests, quotas._records) == ({7: 1}, {7: 2})


def test_bad_frames_of_clients_and_workers_are_counted(world: World) -> None:
    prepare = make_prepare(world)
    prepare._router.num_bad_frames, prepare._links.inbox.num_bad_frames = 2, 3
    assert prepare._collect()["bad_frames"] == 5


# -- results of the tokenizer


class Refusals:
    """A prepare, and its replies as clients read them."""

    def __init__(self, world: World, patch: pytest.MonkeyPatch) -> None:
        self.prepare, self.sent = make_prepare(world), list[m.Rejected]()
        patch.setattr(self.prepare._router, "send", self._send)

    def _send(self, _: bytes, message: m.Rejected) -> bool:
        self.sent.append(decode(encode(message)).message)
        return True

    def recv(self) -> str:
        self.prepare._on_frame_alone(b"peer", FRAME)
        return self.sent[-1].message


def test_reason_that_cannot_be_encoded_is_replaced(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template may raise an error that quotes its input: the request was repeated, and crashed each new prepare."""
    refusals = Refusals(world, monkeypatch)
    monkeypatch.setattr(refusals.prepare._tokenizing, "_tokenize", lambda _: InvalidRequest("no such tool: \ud800"))
    assert refusals.recv() == "no such tool: \\ud800"


def test_error_after_tokenizing_fails_one_request(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals, results = Refusals(world, monkeypatch), list[Any]()
    prepare = refusals.prepare
    monkeypatch.setattr(prepare._tokenizing, "begin", results.append)
    prepare._on_frame_alone(b"peer", FRAME)

    def fail(*_: Any) -> None:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

    monkeypatch.setattr(prepare, "_accept", fail)
    prepare._finish(results[0], Admission(np.array([1, 2, 3], np.int32), 0, 1))
    [refused] = refusals.sent
    assert (refused.request_id, refused.code) == ("a", "request_failed")
    assert refused.message == "the request could not be accepted: UnicodeEncodeError"
    prepare._on_frame_alone(b"peer", FRAME)
    assert len(results) == 2  # it is accepted again if its client repeats it


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 2}, {"prompt_token_ids": [1, 2, 3, 0], "truncation": "right", "max_prompt_tokens": 3}],
    ids=["one answer", "two", "cut before a special token"],
)
def test_records_of_a_completion_say_that_its_answers_go_on(
    options: dict[str, Any], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = make_prepare(world)
    monkeypatch.setattr(prepare._router, "send", lambda *_: None)
    prepare._on_frame_alone(b"peer", encode(m.Submit("a", {"prompt_token_ids": [1, 2, 3], **options})))
    views = [read_request(world.journal, slot) for slot in range(options.get("n", 1))]
    assert [view and view.record.continues_prompt for view in views] == [True] * len(views)


@pytest.mark.parametrize("n", [1, 2])
def test_unread_request_begins_anew_once_all_of_its_records_are_free(
    world: World, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Until then its client gets no reply, or the same as before."""
    prepare, num_accepted = make_prepare(world), list[int]()
    monkeypatch.setattr(prepare._router, "send", lambda *_: None)
    frame = encode(m.Submit("a", {"prompt_token_ids": [1, 2, 3], "max_tokens": 1, "n": n}))
    for slot in (None, *range(n)):
        if slot is not None:
            ReleaseWriter(world.journal).give_up(slot, world.journal.generation(slot))
            world.clock.advance_to(world.clock.now_ns + int(TICK_S * 1e9))
        prepare._receive()
        prepare._on_frame_alone(b"peer", frame)
        num_accepted.append(prepare._collect()["accepted"])
    assert num_accepted == [1] * n + [2]


def test_prompts_that_are_computed_wait_for_a_credit_and_are_counted(world: World) -> None:
    prepare = make_prepare(world)
    for request_id, max_tokens in (("a", 1), ("b", 0)):
        request = {"prompt_token_ids": [1, 2, 3], "max_tokens": max_tokens}
        prepare._on_frame_alone(b"peer", encode(m.Submit(request_id, request)))
    stats = prepare._collect()
    assert (stats["accepted"], stats["waiting"], stats["prompt_tokens"]) == (2, 1, 3)


# -- limits


@pytest.mark.parametrize("limits", [(1, 9), (9, 1)], ids=["queue", "client"])
def test_requests_tokenized_together_respect_the_limits(
    world: World, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int]
) -> None:
    """Chats, for example: when the last of them is received, none has been accepted yet."""
    service = replace(world.config.service, max_queue=limits[0], max_client_requests=limits[1])
    world.config = replace(world.config, service=service)
    prepare, begun, sent = make_prepare(world), list[Any](), list[Any]()
    monkeypatch.setattr(prepare._tokenizing, "begin", begun.append)
    monkeypatch.setattr(prepare._router, "send", lambda _, message: sent.append(message))
    for request_id in ("a", "b"):
        prepare._on_frame_alone(b"peer", encode(m.Submit(request_id, {"prompt_token_ids": [1, 2, 3], "max_tokens": 1})))
    for intake in begun:
        prepare._finish(intake, Admission(np.array([1, 2, 3], np.int32), 0, 1))
    accepted, refused = sent
    assert isinstance(accepted, m.Accepted)
    assert (refused.request_id, refused.code) == ("b", "overloaded")
    assert prepare._ids.seen("b", 0) is None, "it may be sent again"


# -- requests of an earlier process


def test_partly_dispatched_search_is_dispatched_completely(world: World) -> None:
    """Its beams in execute hold credits and wait for the others, which a more urgent request could overtake."""
    writer = RequestWriter(world.journal)
    keys = writer.accept_all([replace(make_record(f"b {i}", num_beams=2), index=i) for i in range(2)], TIMES)
    writer.dispatch(*keys[0], 1)
    urgent = [replace(make_record("urgent"), priority=-1000)]
    [behind] = writer.accept_all(urgent, TIMES)
    prepare = make_prepare(world)
    assert [int(world.journal.states()[slot]) for slot, _ in (*keys, behind)] == [DISPATCHED, DISPATCHED, ACCEPTED]
    assert sorted(prepare._live.items()) == sorted(keys)


@pytest.mark.parametrize(("asked", "num_begun"), [({"num_beams": 2}, 0), ({"n": 2}, 1)], ids=["search", "samples"])
def test_other_sequences_without_a_credit_wait_for_one_again(
    world: World, asked: dict[str, int], num_begun: int
) -> None:
    writer = RequestWriter(world.journal)
    keys = writer.accept_all([replace(make_record(f"b {i}", **asked), index=i) for i in range(2)], TIMES)
    for key in keys[:num_begun]:
        writer.dispatch(*key, 1)
    assert make_prepare(world)._live == dict(keys[:num_begun])
    assert [int(world.journal.state(slot)) for slot, _ in keys[num_begun:]] == [ACCEPTED] * (2 - num_begun)


def test_request_that_execute_has_nothing_to_do_for_gets_no_credit_after_a_restart_either(world: World) -> None:
    """summarize answers it, and execute would have to find out that there is nothing to compute."""
    [key] = RequestWriter(world.journal).accept_all([make_record("a", token_capacity=0)], TIMES)
    prepare = make_prepare(world)
    prepare._dispatch()
    assert (prepare._live, world.journal.state(key[0])) == ({}, ACCEPTED)


def test_repeated_confirmation_is_noted_before_it_is_sent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on summarize waits for the client to follow: it has only now learnt that it may."""
    prepare, told_ns = make_prepare(world), list[int]()
    times_ns = world.journal.records["told_ns"]
    monkeypatch.setattr(prepare._router, "send", lambda *_: told_ns.append(int(times_ns[0])))
    for _ in range(2):
        prepare._on_frame_alone(b"peer", FRAME)
    assert told_ns[0] == 0 < told_ns[1] == times_ns[0]


def test_request_whose_answer_nobody_read_is_refused_when_it_is_sent_again_during_a_stop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would begin anew, once its record is free; its client must not repeat it for ever."""
    prepare, sent = make_prepare(world), list[Any]()
    monkeypatch.setattr(prepare._router, "send", lambda _, message: sent.append(message))
    prepare._on_frame_alone(b"peer", FRAME)
    ReleaseWriter(world.journal).give_up(0, world.journal.generation(0))
    prepare._on_frame_alone(b"peer", FRAME)
    world.board.begin_drain()
    prepare._on_frame_alone(b"peer", FRAME)
    assert [type(message) for message in sent] == [m.Accepted, m.Rejected]
    assert sent[1].code == "draining"


def test_request_in_the_tokenizer_when_a_stop_begins_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If accepted, it could be ended at once, because the driver saw no open requests."""
    prepare, sent = make_prepare(world), list[Any]()
    monkeypatch.setattr(prepare._router, "send", lambda _, message: sent.append(message))
    intakes: list[Any] = []
    monkeypatch.setattr(prepare._tokenizing, "begin", intakes.append)
    prepare._on_frame_alone(b"peer", encode(m.Submit("a", {"prompt_token_ids": [1, 2, 3], "max_tokens": 1})))
    world.board.begin_drain()
    prepare._finish(intakes[0], Admission(np.array([1, 2, 3], np.int32), 0, 1))
    assert [(message.request_id, message.code) for message in sent] == [("a", "draining")]
