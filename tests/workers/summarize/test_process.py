"""How summarize continues from the journal, without other processes."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest

from tests.protocol.factories import TIMES, make_record
from tests.simulation.world import World
from tests.workers.summarize.conftest import KEY, TURN_NS, begin, follow, publish_tokens, turn_after
from tests.workers.summarize.test_columns import step_of
from triptych.protocol import messages as m
from triptych.protocol.codec import encode
from triptych.protocol.journal.deaths import DeathWriter, held_against
from triptych.protocol.journal.layout import Journal
from triptych.protocol.journal.releases import (
    ReleaseWriter,
    is_forgotten,
    read_end_code,
    read_release,
    was_read,
)
from triptych.protocol.journal.requests import RequestView, RequestWriter
from triptych.protocol.journal.tokens import TokenWriter, read_tokens
from triptych.protocol.record_key import number_of
from triptych.workers.summarize import answers
from triptych.workers.summarize.ends import MAX_COUNTED_ADAPTERS
from triptych.workers.summarize.process import Summarize


def poison(world: World, key: tuple[int, int] = KEY) -> None:
    for _ in range(2):
        DeathWriter(world.journal).add("summarize", key, is_alone=True)


def test_request_that_crashed_summarize_twice_fails(world: World) -> None:
    poison(world)
    begin(world)
    assert read_release(world.journal, *KEY) == (0, "error")
    assert read_end_code(world.journal, *KEY) == "poisoned"


def test_written_end_stays_even_if_its_text_cannot_be_made(world: World) -> None:
    """Its credit and pages were returned for that end, and a client may have received it."""
    ReleaseWriter(world.journal).release(*KEY, num_tokens=2, reason="stop")
    poison(world)
    [answer] = begin(world)._answers.values()
    assert read_release(world.journal, *KEY) == (2, "stop")
    assert read_end_code(world.journal, *KEY) == ""
    assert answer.error is not None
    assert answer.error[0] == "poisoned"


@pytest.mark.parametrize("best_of", [1, 2], ids=["plain", "ranked"])
def test_answer_that_was_read_is_freed_at_once(world: World, best_of: int) -> None:
    """A search for garbage is so rare that thousands of them would wait for it, with all their text."""
    ReleaseWriter(world.journal).forget(*KEY)
    records = [replace(make_record(f"b {i}", best_of=best_of, logprobs=0), index=i) for i in range(best_of)]
    for key in RequestWriter(world.journal).accept_all(records[:best_of], TIMES):
        publish_tokens(world, TIMES.accepted_ns, slot=key[0])
    body = begin(world)
    for answer in list(body._answers.values()):
        body._ends.end(answer, "length")
    answers = [weakref.ref(answer) for answer in body._answers.values()]
    del answer
    gc.disable()
    try:
        body._on_frame_safely(b"client", encode(m.Acknowledge(["b"])))
        body.turn()
        assert [answer() for answer in answers] == [None] * best_of
    finally:
        gc.enable()


def test_damaged_record_is_logged_once_and_used_once_it_is_valid(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.journal.records["crc"][0] ^= 1
    body = begin(world)
    for _ in range(5):
        turn_after(world, body, TURN_NS)
    assert caplog.messages == ["a record of the journal is damaged: journal record 0: checksum does not match"]
    world.journal.records["crc"][0] ^= 1
    turn_after(world, body, TURN_NS)
    assert list(body._answers) == [0]


def test_stop_waits_for_the_reader_of_an_answer_that_is_only_chosen_at_the_stop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its follower reads none of the candidates before; the answer is longer than what may be sent at once."""
    ReleaseWriter(world.journal).forget(*KEY)
    records = [replace(make_record(f"b {i}", best_of=2, logprobs=0), index=i) for i in range(2)]
    for key in RequestWriter(world.journal).accept_all(records, TIMES):
        publish_tokens(world, *[TIMES.accepted_ns] * 5, slot=key[0])
    world.config = replace(world.config, service=replace(world.config.service, window_tokens=2))
    body, received = begin(world), list[Any]()
    turn = body.turn

    def turn_and_let_the_client_read() -> None:
        turn()
        is_over = received and isinstance(received[-1], m.Finished)
        reply = m.Acknowledge(["b"]) if is_over else m.Follow([["b", 2 * len(received), False]])
        body._on_frame_safely(b"client", encode(reply))

    def deliver(_: bytes, message: Any) -> bool:
        received.append(message)
        return True

    monkeypatch.setattr(body, "turn", turn_and_let_the_client_read)
    monkeypatch.setattr(body._router, "deliver", deliver)
    body.turn()
    body._end_all()
    assert [type(message) for message in received] == [m.Text, m.Text, m.Finished]


def test_request_that_prepare_accepts_during_a_stop_is_ended_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client would wait for an answer that nobody computes."""
    ReleaseWriter(world.journal).forget(*KEY)
    page, turn, late = world.board.worker("prepare"), Summarize.turn, list[tuple[int, int]]()

    def accept_and_turn(body: Summarize) -> None:
        if late:
            body._on_frame_safely(b"client", encode(m.Acknowledge(["late"])))
        else:
            late.append(RequestWriter(world.journal).accept(make_record("late"), TIMES))
            page.set_phase(world.board.epoch("prepare"), "stopped")
        turn(body)

    page.set_phase(world.board.epoch("prepare"), "ready")
    monkeypatch.setattr(Summarize, "turn", accept_and_turn)
    begin(world)._end_all()
    assert read_release(world.journal, *late[0]) == (0, "abort")


def test_request_that_could_not_be_turned_into_text_is_not_suspected_of_what_happens_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no text")

    body = begin(world)
    [answer] = body._answers.values()
    monkeypatch.setattr(answer.stream, "push", fail)
    body._answers.take(step_done((0, 5, 0)))
    assert read_release(world.journal, *KEY) == (0, "error")
    assert world.board.intent("summarize").read() == []


def test_suspect_that_could_be_turned_into_text_is_cleared(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is turned into text, this process may crash on it."""
    DeathWriter(world.journal).add("summarize", KEY, is_alone=True)
    body, busy_with = begin(world), list[list[int]]()
    [answer] = body._answers.values()
    assert held_against(world.journal, "summarize", *KEY) == 1
    intent = world.board.intent("summarize")
    monkeypatch.setattr(answer.stream, "push", lambda _: busy_with.append(intent.read()))
    for index in range(2):
        body._answers.take(step_done((index, 5, 0)))
    assert (busy_with, intent.read()) == ([[number_of(KEY)]] * 2, [])
    assert held_against(world.journal, "summarize", *KEY) == 0


def test_answer_that_ended_at_a_stop_token_ends_once(world: World) -> None:
    ReleaseWriter(world.journal).forget(*KEY)
    key = RequestWriter(world.journal).accept(make_record("b", stop_token_ids=[5]), TIMES)
    body = begin(world)
    body._answers.take(step_of((*key, 0, 5, 0)))
    body._on_frame_safely(b"client", encode(m.Abort("b")))
    assert (body._ends.num_ended, read_release(world.journal, *key)) == ({"stop": 1}, (1, "stop"))


def test_others_are_told_of_an_end_and_prepare_of_what_is_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or credits, pages and records would return only with the next scan of the journal."""
    body, told = begin(world), list[tuple[str, type]]()
    monkeypatch.setattr(body._links, "send", lambda role, message: told.append((role, type(message))))
    for frame in (m.Abort("a"), m.Acknowledge(["a"])):
        body._on_frame_safely(b"client", encode(frame))
        body.turn()
    assert told == [("execute", m.Release), ("prepare", m.Release), ("prepare", m.Forgotten)]


@pytest.mark.parametrize(
    ("size", "reason", "counted"), [(0, "length", "length"), (4, "length", "embedding"), (4, "abort", "abort")]
)
def test_embeddings_are_not_counted_as_answers_that_were_cut(
    world: World, size: int, reason: str, counted: str
) -> None:
    ReleaseWriter(world.journal).forget(*KEY)
    RequestWriter(world.journal).accept(make_record("b", embedding_size=size), TIMES)
    body = begin(world)
    [answer] = body._answers.values()
    body._ends.end(answer, reason)
    assert body._ends.num_ended == {counted: 1}


def test_answer_that_ended_can_be_read_after_a_restart(world: World) -> None:
    """Up to its end, which may be before the last token that execute wrote."""
    publish_tokens(world, *[TIMES.accepted_ns] * 3)
    ReleaseWriter(world.journal).release(*KEY, num_tokens=2, reason="stop")
    [answer] = begin(world)._answers.values()
    assert (answer.stream.token_ids, answer.stream.finish_reason) == ([5, 5], "stop")


# -- what is left of an earlier request in the same record


def test_tokens_of_an_earlier_request_are_not_those_of_the_next(world: World) -> None:
    body = begin(world)
    body._answers.take(step_of((KEY[0], KEY[1] - 1, 0, 5, 0)))
    [answer] = body._answers.values()
    assert (answer.stream.token_ids, body._collect()["stale_tokens"]) == ([], 1)


# -- several tokens of a sequence at once


def step_done(*rows: tuple[int, int, int]) -> m.StepDone:
    """Index, token and finish reason of the only request."""
    return step_of(*((*KEY, *row) for row in rows))


@pytest.mark.parametrize(("num_known", "num_new"), [(0, 4), (1, 3), (4, 0), (5, 0)])
def test_known_tokens_of_a_run_are_skipped(world: World, num_known: int, num_new: int) -> None:
    """A scan of the journal may have been faster than the message."""
    publish_tokens(world, *[TIMES.accepted_ns] * num_known)
    body = begin(world)
    body._answers.take(step_done(*[(index, 5, 0) for index in range(4)]))
    [answer] = body._answers.values()
    assert answer.stream.token_ids == [5] * max(num_known, 4)
    assert body._collect()["tokens"] == num_new


def test_run_after_a_gap_is_read_from_the_journal_with_the_gap(world: World) -> None:
    body = begin(world)
    publish_tokens(world, *[TIMES.accepted_ns] * 4)
    body._answers.take(step_done((2, 5, 0), (3, 5, m.FINISH_REASONS.index("length"))))
    [answer] = body._answers.values()
    assert answer.stream.token_ids == [5] * 4
    assert read_release(world.journal, *KEY) == (4, "length")


def test_end_after_a_gap_waits_for_the_tokens_before_it(world: World) -> None:
    """On a weakly ordered machine, the message may be seen before what was written first."""
    body = begin(world)
    body._answers.take(step_done((1, 5, m.FINISH_REASONS.index("length"))))
    assert read_release(world.journal, *KEY) is None
    publish_tokens(world, *[TIMES.accepted_ns] * 2)
    TokenWriter(world.journal).finish(*KEY, "length")
    turn_after(world, body, TURN_NS)
    assert read_release(world.journal, *KEY) == (2, "length")


def test_token_written_while_the_journal_is_read_is_part_of_the_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end, written in the same moment, must not be seen before it."""
    body = begin(world)
    [answer] = body._answers.values()
    publish_tokens(world, TIMES.accepted_ns)

    def read_just_before_the_last(journal: Journal, view: RequestView) -> Any:
        found = read_tokens(journal, view)
        monkeypatch.setattr(answers, "read_tokens", read_tokens)
        publish_tokens(world, TIMES.accepted_ns)
        TokenWriter(world.journal).finish(*KEY, "length")
        return found

    monkeypatch.setattr(answers, "read_tokens", read_just_before_the_last)
    body._answers.catch_up(answer)
    assert read_release(world.journal, *KEY) is None
    body._answers.catch_up(answer)
    assert read_release(world.journal, *KEY) == (2, "length")


def test_end_whose_tokens_are_not_visible_yet_is_waited_for(world: World) -> None:
    """As on a weakly ordered machine."""
    body = begin(world)
    [answer] = body._answers.values()
    publish_tokens(world, TIMES.accepted_ns)
    TokenWriter(world.journal).finish(*KEY, "length")
    for is_visible in (False, True):
        world.journal.words[answer.view.extent.tokens_at] = 5 if is_visible else 6
        body._answers.catch_up(answer)
        assert (read_release(world.journal, *KEY) == (1, "length")) is is_visible


def test_tokens_found_in_the_journal_are_flushed_before_a_client_sees_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """execute writes them first, and then waits for the disk."""
    service = replace(world.config.service, journal="/disk", journal_flush="step")
    world.config = replace(world.config, service=service)
    body, done = begin(world), list[str]()

    def deliver(_: bytes, message: Any) -> bool:
        done.append(type(message).__name__)
        return True

    monkeypatch.setattr(body._journal, "flush", lambda: done.append("flush"))
    monkeypatch.setattr(body._router, "deliver", deliver)
    follow(body)
    turn_after(world, body, TURN_NS)
    assert done == []
    publish_tokens(world, world.journal.now_ns())
    turn_after(world, body, TURN_NS)
    assert done == ["flush", "Text"]


@pytest.mark.parametrize("is_poison", [False, True], ids=["harmless", "poison"])
@pytest.mark.parametrize("asked", [{"n": 2}, {"n": 2, "best_of": 3}], ids=["samples", "the best"])
def test_acknowledgement_of_one_of_several_choices_survives_a_restart(
    world: World, asked: dict[str, int], is_poison: bool
) -> None:
    """Its client no longer follows it: the request would stay for a lease, and count as unread. It is the same choice
    again, even if its text can no longer be made.
    """
    writer, size = RequestWriter(world.journal), max(asked.values())
    keys = writer.accept_all([replace(make_record(f"b {i}", **asked), index=i) for i in range(size)], TIMES)
    for key in keys:
        ReleaseWriter(world.journal).release(*key, num_tokens=0, reason="length")
    body = begin(world)
    body._on_frame_safely(b"client", encode(m.Acknowledge(["b 0"])))
    body._links.close()
    assert not [key for key in keys if is_forgotten(world.journal, *key)]
    if is_poison:
        poison(world, keys[0])
    begin(world)._on_frame_safely(b"client", encode(m.Acknowledge(["b 1"])))
    assert [was_read(world.journal, *key) for key in keys] == [True] * size


@pytest.mark.parametrize(("num_prompt_tokens", "code"), [(3, "deadline_exceeded"), (1, None)])
def test_failure_before_the_prompt_has_its_logprobs_is_an_answer_of_its_request(
    world: World, num_prompt_tokens: int, code: str | None
) -> None:
    """The other candidate succeeded, but has none of them: its client would get an answer without what it asked for. A
    prompt of one token has no logprobs.
    """
    asked: dict[str, Any] = {"best_of": 2, "prompt_logprobs": 1, "num_prompt_tokens": num_prompt_tokens}
    records = [replace(make_record("b", **asked), index=i) for i in range(2)]
    keys = RequestWriter(world.journal).accept_all(records, TIMES)
    for key, reason in zip(keys, ("error", "length"), strict=True):
        ReleaseWriter(world.journal).release(*key, num_tokens=0, reason=reason, code="deadline_exceeded")
    choices = begin(world)._requests.get("b")
    assert choices is not None
    answer = choices.follow(0, b"client", 0, True)
    assert answer is not None
    assert (answer.error and answer.error[0]) == code


def test_counts_of_adapters_that_come_and_go_do_not_fill_the_board(world: World) -> None:
    """Each tenant may have its own, loaded only while it is needed. One that is used all the time stays."""
    body, num_adapters = begin(world), MAX_COUNTED_ADAPTERS + 100
    [answer] = body._answers.values()
    for number in range(num_adapters):
        for name in (f"{number:0128}", "always"):
            record = replace(answer.view.record, lora=name)
            answer.view = replace(answer.view, record=record)
            body._ends._count(answer, "length")
    body._context.page.publish(body._collect())
    adapted = world.board.stats()["summarize"]["adapted"]
    assert list(adapted.items())[-2:] == [(f"{num_adapters - 1:0128}", 1), ("always", num_adapters)]
    assert len(adapted) == MAX_COUNTED_ADAPTERS


# -- much to do at once


def test_each_step_and_each_recovered_answer_is_progress(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A summarize that fell behind has thousands of steps to process, and must not be taken for hung."""
    body, done = begin(world), list[str]()
    step = m.StepDone(b"", b"", b"", b"", b"")
    messages = [[step, step], []]
    monkeypatch.setattr(body._links.inbox, "recv_all", lambda: messages.pop(0))
    monkeypatch.setattr(body._answers, "take", lambda _: done.append("step"))
    monkeypatch.setattr(body._context.page, "progress", lambda: done.append("progress"))
    body.turn()
    assert done == ["step", "progress"] * 2
    publish_tokens(world, world.journal.now_ns())
    turn_after(world, body, TURN_NS)
    assert done[4:] == ["progress"]
