"""What a person at a terminal reads about a failed worker."""

from __future__ import annotations

import traceback

from triptych.launch.terminal.failures import explain
from triptych.protocol.errors import ConfigError, TriptychError, WorkerDied


def words_of(error: BaseException) -> str:
    """The lines that a worker logs."""
    return "12:00:00 execute ERROR worker execute failed\n" + "".join(traceback.format_exception(error)).rstrip()


def failed(first: Exception, then: Exception) -> Exception:
    try:
        try:
            raise first
        except type(first) as error:
            raise then from error
    except type(then) as error:
        return error


def explained(error: Exception) -> str:
    return explain(WorkerDied("execute", 1, words_of(error)))


def test_error_of_ours_is_shown_without_its_traceback() -> None:
    assert explained(failed(OSError("gone"), ConfigError("it is not there"))) == "execute: it is not there"


def test_last_error_of_a_chain_is_shown() -> None:
    error = failed(ConfigError("no such folder"), ConfigError("the draft model: no such folder\nlook again"))
    assert explained(error) == "execute: the draft model: no such folder\nlook again"


def test_other_errors_are_shown_completely() -> None:
    assert "ValueError: what is this" in explained(failed(KeyError("key"), ValueError("what is this")))
    assert explain(TriptychError("no")) == "no"
