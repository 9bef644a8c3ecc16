"""Whom the driver holds a death against."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.protocol.factories import TIMES, accept, make_record
from triptych.driver.blame import Blame
from triptych.protocol.board import Board
from triptych.protocol.journal.deaths import MAX_AHEAD, POISONED, held_against, note_survival, num_ahead
from triptych.protocol.journal.deaths import suspects as slots_of_suspects
from triptych.protocol.journal.layout import Journal
from triptych.protocol.journal.requests import RequestWriter

DIGEST = 7


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path / "board")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.create(tmp_path / "journal", num_records=2, arena_bytes=4096)


def work_on(board: Board, digest: int) -> None:
    intent = board.intent("prepare")
    intent.set_standing([digest])
    intent.begin()


def test_a_death_by_its_own_fault_is_held_against_what_was_being_worked_on(board: Board, journal: Journal) -> None:
    blame = Blame(board, journal)
    work_on(board, DIGEST)
    blame.note_death("prepare", internal=True)
    assert board.suspects() == {DIGEST: 1}


def test_a_death_from_outside_is_held_against_nobody(board: Board, journal: Journal) -> None:
    blame = Blame(board, journal)
    work_on(board, DIGEST)
    blame.note_death("prepare", internal=False)
    assert board.suspects() == {}


def test_what_was_worked_on_when_the_driver_died_is_not_held_against_anybody(board: Board, journal: Journal) -> None:
    """The workers go with it, and the next one would read what they left as the work of its own, which died early."""
    work_on(board, DIGEST)
    blame = Blame(board, journal)
    blame.note_death("prepare", internal=True)
    assert board.suspects() == {}


def test_two_deaths_far_apart_name_nobody_if_it_did_no_harm_in_between(board: Board, journal: Journal) -> None:
    blame = Blame(board, journal)
    for deaths in (1, 2):
        work_on(board, DIGEST)
        blame.note_death("prepare", internal=True)
        assert board.suspects() == {DIGEST: deaths}
        board.note_survival(DIGEST, deaths)


@pytest.mark.parametrize("role", ["execute", "summarize"])
def test_what_ended_a_worker_twice_is_known_by_its_content(board: Board, journal: Journal, role: str) -> None:
    """Or its client sends it once more, under another id, and two more deaths are what it costs."""
    view = accept(RequestWriter(journal), journal, make_record(digest=DIGEST))
    blame = Blame(board, journal)
    for suspects in ({}, {DIGEST: POISONED}):
        board.intent(role).begin_one(view.slot << 32 | view.generation)
        blame.note_death(role, internal=True)
        assert board.suspects() == suspects


def test_who_was_named_stays_named(board: Board, journal: Journal) -> None:
    blame = Blame(board, journal)
    board.set_suspect(DIGEST, POISONED)
    board.intent("prepare").set_others([DIGEST + 1])
    work_on(board, DIGEST)
    blame.note_death("prepare", internal=True)
    assert board.suspects() == {DIGEST: POISONED, DIGEST + 1: 1}


def test_the_beams_of_a_search_are_named_together_for_they_never_run_alone(board: Board, journal: Journal) -> None:
    beams = [replace(make_record(f"a {index}", digest=DIGEST, num_beams=2), index=index) for index in range(2)]
    keys = RequestWriter(journal).accept_all(beams, TIMES)
    blame, explained = Blame(board, journal), []
    for _ in range(2):
        board.intent("execute").set_others([slot << 32 | generation for slot, generation in keys])
        board.intent("execute").begin()
        explained.append(blame.note_death("execute", internal=True))
    assert explained == [0, 2]
    assert [held_against(journal, "execute", *key) for key in keys] == [POISONED] * 2


def test_with_the_death_it_is_noted_how_far_the_worker_was_ahead_of_the_journal(board: Board, journal: Journal) -> None:
    """So many tokens a suspect says again, alone, before the one that killed."""
    key = accept(RequestWriter(journal), journal, make_record()).slot, 1
    blame = Blame(board, journal)
    for deaths, ahead in enumerate((12, MAX_AHEAD + 5), 1):
        board.intent("execute").set_others([key[0] << 32 | key[1], 99 << 32])
        board.intent("execute").begin(num_ahead=ahead)
        blame.note_death("execute", internal=True)
        assert num_ahead(journal, "execute", *key) == min(ahead, MAX_AHEAD)
        assert held_against(journal, "execute", *key) == deaths
        note_survival(journal, "execute", *key)
        assert held_against(journal, "execute", *key) == 0
        assert slots_of_suspects(journal, "execute") == []


def test_suspects_of_two_requests_are_not_named_together(board: Board, journal: Journal) -> None:
    writer, blame = RequestWriter(journal), Blame(board, journal)
    views = [accept(writer, journal, make_record(name)) for name in "ab"]
    for deaths in (1, 2):
        board.intent("execute").set_others([view.slot << 32 | view.generation for view in views])
        board.intent("execute").begin()
        assert blame.note_death("execute", internal=True) == 0
        assert [held_against(journal, "execute", v.slot, v.generation) for v in views] == [deaths] * 2


@pytest.mark.parametrize("role", ["prepare", "execute"])
def test_when_one_is_named_his_two_deaths_are_explained(board: Board, journal: Journal, role: str) -> None:
    view = accept(RequestWriter(journal), journal, make_record(digest=DIGEST))
    key, blame = DIGEST if role == "prepare" else view.slot << 32 | view.generation, Blame(board, journal)
    explained = []
    for _ in range(2):
        board.intent(role).begin_one(key)
        explained.append(blame.note_death(role, internal=True))
    assert explained == [0, 2]
    assert blame.note_death(role, internal=False) == 0
