"""What a worker was about to process is known after its death, and recording it costs almost nothing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import pytest

from triptych.protocol.board import SUSPECT_SLOTS, Board
from triptych.protocol.intent import MAX_KEYS


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path / "board")


def test_intent_is_visible_through_another_process_s_board(board: Board, tmp_path: Path) -> None:
    intent = board.intent("execute")
    intent.set_standing([1, 2, 1 << 63])
    intent.set_others([7, 2])
    assert intent.read() == []
    intent.begin()
    assert Board(tmp_path / "board").intent("execute").read() == [1, 2, 1 << 63, 7]
    assert board.intent("prepare").read() == []
    intent.end()
    assert Board(tmp_path / "board").intent("execute").read() == []


def test_intent_tells_how_far_the_worker_is_ahead_of_the_journal(board: Board) -> None:
    intent = board.intent("execute")
    intent.set_standing([1])
    for num_ahead in (0, 17):
        intent.begin(num_ahead=num_ahead)
        assert (intent.read(), intent.num_ahead) == ([1], num_ahead)
    intent.end()
    assert intent.num_ahead == 0


def test_single_intent_replaces_the_previous_ones(board: Board) -> None:
    intent = board.intent("summarize")
    intent.set_standing([1, 2, 3])
    intent.begin_one(9)
    assert intent.read() == [9]
    intent.clear()
    assert intent.read() == []


@pytest.mark.parametrize("store", range(4))
@pytest.mark.parametrize("write", ["set_standing", "begin_one"])
def test_half_written_intent_names_no_earlier_request(board: Board, store: int, write: str) -> None:
    intent = board.intent("execute")
    intent.set_standing([1, 2, 3])
    intent.set_standing([])
    is_begun = write == "set_standing"
    intent.begin() if is_begun else intent.end()
    words = intent._words
    intent._words = _Mortal(words, store)  # type: ignore[assignment]
    with suppress(ZeroDivisionError):
        intent.set_standing([9]) if is_begun else intent.begin_one(9)
    intent._words = words
    assert intent.read() in ([], [9])


class _Mortal:
    """Words of which only so many are written."""

    def __init__(self, words: memoryview, num_stores: int) -> None:
        self._words, self._num_left = words, num_stores

    def __setitem__(self, at: int | slice, value: Any) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise ZeroDivisionError
        self._words[at] = value


def test_excess_intents_are_cut(board: Board) -> None:
    intent = board.intent("execute")
    intent.set_standing(range(MAX_KEYS + 10))
    intent.set_others([5])
    intent.begin()
    assert intent.read() == list(range(MAX_KEYS))


def test_step_of_unchanged_rows_costs_less_than_a_microsecond(board: Board) -> None:
    intent = board.intent("execute")
    intent.set_standing(range(256))
    best = min(_time_steps(intent) for _ in range(20))
    assert best < 1000


def _time_steps(intent: object) -> float:
    start = perf_counter_ns()
    for _ in range(1000):
        intent.begin()  # type: ignore[attr-defined]
        intent.end()  # type: ignore[attr-defined]
    return (perf_counter_ns() - start) / 1000


def test_suspects_outlive_the_board_and_the_oldest_are_dropped(board: Board, tmp_path: Path) -> None:
    board.set_suspect(11, 1)
    board.set_suspect(11, 2)
    assert Board(tmp_path / "board").suspects() == {11: 2}
    for digest in range(100, 100 + SUSPECT_SLOTS):
        board.set_suspect(digest, 1)
    suspects = board.suspects()
    assert 11 not in suspects
    assert len(suspects) == SUSPECT_SLOTS


def test_suspect_that_survived_is_only_suspected_again_after_its_next_crash(board: Board) -> None:
    board.set_suspect(11, 1)
    board.set_suspect(12, 1)
    board.note_survival(11, 1)
    assert board.suspects() == {12: 1}
    board.set_suspect(11, board.deaths_of(11) + 1)
    assert board.suspects() == {11: 2, 12: 1}


def test_surviving_one_crash_does_not_clear_the_next(board: Board) -> None:
    """The driver may have blamed it meanwhile for crashing another worker."""
    board.set_suspect(11, 2)
    board.note_survival(11, 1)
    assert board.suspects() == {11: 2}


def test_survival_is_recorded_per_request(board: Board) -> None:
    board.set_suspect(11, 1)
    board.note_survival(11, 1)
    board.note_survival(12, 1)
    for digest in range(100, 100 + SUSPECT_SLOTS):
        board.set_suspect(digest, 1)
    assert len(board.suspects()) == SUSPECT_SLOTS


def test_change_of_the_suspects_changes_their_version(board: Board) -> None:
    versions = [board.suspects_version]
    for deaths in (1, 2):
        board.set_suspect(11, deaths)
        versions.append(board.suspects_version)
    assert len(set(versions)) == 3


def test_board_can_be_closed(board: Board) -> None:
    board.close()
