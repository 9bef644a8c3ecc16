"""Which requests the driver blames for a worker's death."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.protocol.factories import TIMES, accept, make_record
from triptych.driver.blame import Blame
from triptych.driver.deaths import Death
from triptych.protocol.board import Board
from triptych.protocol.journal.deaths import (
    MAX_AHEAD,
    OUT_OF_MEMORY,
    POISONED,
    DeathWriter,
    held_against,
    note_survival,
    num_ahead,
    poisoned,
)
from triptych.protocol.journal.deaths import suspects as slots_of_suspects
from triptych.protocol.journal.layout import ACCEPTED, Journal, word
from triptych.protocol.journal.releases import ReleaseWriter
from triptych.protocol.journal.requests import RequestWriter
from triptych.protocol.record_key import number_of

DIGEST = 7


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path / "board")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.create(tmp_path / "journal", num_records=2, arena_bytes=4096)


def died(role: str, *, internal: bool = True, out_of_memory: bool = False) -> Death:
    return Death(role, -signal.SIGSEGV, is_internal=internal, out_of_memory=out_of_memory)


def work_on(board: Board, digest: int) -> None:
    intent = board.intent("prepare")
    intent.set_standing([digest])
    intent.begin()


def test_crash_is_blamed_on_the_requests_in_progress(board: Board, journal: Journal) -> None:
    blame = Blame(board, journal)
    work_on(board, DIGEST)
    blame.note_death(died("prepare"))
    assert board.suspects() == {DIGEST: 1}


def test_kill_from_outside_is_blamed_on_no_request(board: Board, journal: Journal) -> None:
    blame = Blame(board, journal)
    work_on(board, DIGEST)
    blame.note_death(died("prepare", internal=False))
    assert board.suspects() == {}


def test_requests_of_a_crash_are_not_blamed_for_the_next_one(board: Board, journal: Journal) -> None:
    """Of a process that died before it worked on anything, as while it loaded the model."""
    blame = Blame(board, journal)
    work_on(board, DIGEST)
    blame.note_death(died("prepare"))
    blame.note_death(died("prepare"))
    assert board.suspects() == {DIGEST: 1}


def test_requests_in_progress_when_the_driver_died_are_not_blamed(board: Board, journal: Journal) -> None:
    """The workers die with the driver, and the next driver must not blame their unfinished work for it."""
    work_on(board, DIGEST)
    blame = Blame(board, journal)
    blame.note_death(died("prepare"))
    assert board.suspects() == {}


def test_two_crashes_far_apart_poison_no_request_that_survived_in_between(board: Board, journal: Journal) -> None:
    blame = Blame(board, journal)
    for deaths in (1, 2):
        work_on(board, DIGEST)
        blame.note_death(died("prepare"))
        assert board.suspects() == {DIGEST: deaths}
        board.note_survival(DIGEST, deaths)


@pytest.mark.parametrize("role", ["execute", "summarize"])
def test_request_that_crashed_a_worker_twice_is_recognised_by_its_content(
    board: Board, journal: Journal, role: str
) -> None:
    """Otherwise its client could send it again under another id, at the cost of two more crashes."""
    view = accept(RequestWriter(journal), journal, make_record(digest=DIGEST))
    blame = Blame(board, journal)
    for suspects in ({}, {DIGEST: POISONED}):
        board.intent(role).begin_one(number_of(view.key))
        blame.note_death(died(role))
        assert board.suspects() == suspects


@pytest.mark.parametrize("role", ["execute", "summarize"])
def test_request_for_which_memory_ran_out_may_be_sent_again_to_the_next_driver(
    board: Board, journal: Journal, role: str
) -> None:
    """There may be more memory by then."""
    view, blame = accept(RequestWriter(journal), journal, make_record(digest=DIGEST)), Blame(board, journal)
    for deaths, suspects in ((1, {}), (OUT_OF_MEMORY, {DIGEST: OUT_OF_MEMORY})):
        board.intent(role).begin_one(number_of(view.key))
        blame.note_death(died(role, out_of_memory=True))
        assert (held_against(journal, role, *view.key), board.suspects()) == (deaths, suspects)
    error = poisoned(OUT_OF_MEMORY, "it crashed")
    assert error is not None
    assert "each time it ran alone, memory ran out" in error.message
    Blame(board, journal)
    assert board.suspects() == {}


def test_poisoned_request_stays_poisoned(board: Board, journal: Journal) -> None:
    blame = Blame(board, journal)
    board.set_suspect(DIGEST, POISONED)
    board.intent("prepare").set_others([DIGEST + 1])
    work_on(board, DIGEST)
    blame.note_death(died("prepare"))
    assert board.suspects() == {DIGEST: POISONED, DIGEST + 1: 1}


def test_beams_of_a_search_are_poisoned_together_because_they_never_run_alone(board: Board, journal: Journal) -> None:
    beams = [replace(make_record(f"a {index}", digest=DIGEST, num_beams=2), index=index) for index in range(2)]
    keys = RequestWriter(journal).accept_all(beams, TIMES)
    blame, explained = Blame(board, journal), []
    for _ in range(2):
        board.intent("execute").set_others(list(map(number_of, keys)))
        board.intent("execute").begin()
        explained.append(blame.note_death(died("execute")))
    assert explained == [0, 2]
    assert [held_against(journal, "execute", *key) for key in keys] == [POISONED] * 2


def test_crash_records_how_far_the_worker_was_ahead_of_the_journal(board: Board, journal: Journal) -> None:
    """A suspect repeats that many tokens, alone, before the one that crashed."""
    key = accept(RequestWriter(journal), journal, make_record()).slot, 1
    blame = Blame(board, journal)
    for deaths, ahead in enumerate((12, MAX_AHEAD + 5), 1):
        board.intent("execute").set_others([number_of(key), 99 << 32])
        board.intent("execute").begin(num_ahead=ahead)
        blame.note_death(died("execute"))
        assert num_ahead(journal, "execute", *key) == min(ahead, MAX_AHEAD)
        assert held_against(journal, "execute", *key) == deaths
        note_survival(journal, "execute", *key)
        assert held_against(journal, "execute", *key) == 0
        assert slots_of_suspects(journal, "execute") == []


def test_suspects_of_two_requests_are_not_poisoned_together(
    board: Board, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    writer, blame = RequestWriter(journal), Blame(board, journal)
    views = [accept(writer, journal, make_record(name)) for name in "ab"]
    for deaths in (1, 2):
        board.intent("execute").set_others([number_of(view.key) for view in views])
        board.intent("execute").begin()
        assert blame.note_death(died("execute")) == 0
        assert [held_against(journal, "execute", v.slot, v.generation) for v in views] == [deaths] * 2
    assert caplog.messages == ["execute died while processing 2 requests: they run alone first"] * 2


def test_prompts_that_were_handled_together_are_not_poisoned_together(board: Board, journal: Journal) -> None:
    blame = Blame(board, journal)
    for deaths in (1, 2):
        board.intent("prepare").set_others([DIGEST + 1])
        work_on(board, DIGEST)
        assert blame.note_death(died("prepare")) == 0
        assert board.suspects() == {DIGEST: deaths, DIGEST + 1: deaths}


def test_request_in_a_step_with_one_whose_record_was_reused_was_not_alone(board: Board, journal: Journal) -> None:
    view = accept(RequestWriter(journal), journal, make_record())
    blame = Blame(board, journal)
    for _ in range(2):
        board.intent("execute").set_others([number_of(view.key), number_of((view.slot, view.generation + 1))])
        board.intent("execute").begin()
        assert blame.note_death(died("execute")) == 0
    assert held_against(journal, "execute", *view.key) == 2


@pytest.mark.parametrize("is_free", [False, True], ids=["reused", "free"])
def test_request_that_is_gone_is_not_blamed(
    board: Board, journal: Journal, is_free: bool, caplog: pytest.LogCaptureFixture
) -> None:
    writer, blame = RequestWriter(journal), Blame(board, journal)
    view = accept(writer, journal)
    ReleaseWriter(journal).forget(*view.key)
    assert writer.recycle(*view.key)
    if not is_free:
        journal.prepare_words[view.slot] = word(view.generation + 1, ACCEPTED)
    before = journal.records.tobytes()
    board.intent("execute").begin_one(number_of(view.key))
    assert blame.note_death(died("execute")) == 0
    assert (journal.records.tobytes(), caplog.messages) == (before, [])


def test_many_deaths_among_others_poison_no_request(journal: Journal) -> None:
    key = accept(RequestWriter(journal), journal).key
    journal.records["deaths_word"][key[0]] = word(key[1], OUT_OF_MEMORY - 2)
    assert [DeathWriter(journal).add("execute", key, is_alone=False) for _ in range(2)] == [OUT_OF_MEMORY - 1] * 2


def test_record_that_was_freed_is_no_suspect(journal: Journal) -> None:
    writer = RequestWriter(journal)
    key = accept(writer, journal).key
    DeathWriter(journal).add("execute", key, is_alone=False)
    assert slots_of_suspects(journal, "execute") == [key[0]]
    ReleaseWriter(journal).forget(*key)
    assert writer.recycle(*key)
    assert slots_of_suspects(journal, "execute") == []


@pytest.mark.parametrize("role", ["prepare", "execute"])
def test_poisoning_a_request_explains_both_of_its_crashes(board: Board, journal: Journal, role: str) -> None:
    view = accept(RequestWriter(journal), journal, make_record(digest=DIGEST))
    key, blame = DIGEST if role == "prepare" else number_of(view.key), Blame(board, journal)
    explained = []
    for _ in range(2):
        board.intent(role).begin_one(key)
        explained.append(blame.note_death(died(role)))
    assert explained == [0, 2]
    assert blame.note_death(died(role, internal=False)) == 0
