"""The errors form one tree, and each has a stable code that survives the wire."""

from __future__ import annotations

import copy

import pytest

from triptych.protocol import errors
from triptych.protocol.errors import REQUEST_ERRORS, RequestError, TriptychError, WorkerDied, from_wire

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TriptychError)]
# Clients and dashboards depend on these strings and numbers.
HTTP_STATUS = {
    "error": 500,
    "config": 500,
    "journal": 500,
    "worker_died": 503,
    "closed": 503,
    "request_failed": 500,
    "invalid_request": 400,
    "empty_prompt": 400,
    "prompt_too_long": 400,
    "duplicate_id": 409,
    "unknown_id": 404,
    "bad_frame": 400,
    "overloaded": 429,
    "draining": 503,
    "tokenization_failed": 400,
    "model_failed": 500,
    "poisoned": 500,
    "pipeline_failed": 503,
    "deadline_exceeded": 504,
    "timeout": 504,
}


def test_codes_and_their_http_status_are_stable() -> None:
    assert {kind.code: kind.http_status for kind in ALL} == HTTP_STATUS


def test_no_two_errors_share_a_code() -> None:
    assert len({kind.code for kind in ALL}) == len(ALL)


@pytest.mark.parametrize("code", REQUEST_ERRORS)
def test_request_error_survives_the_wire(code: str) -> None:
    error = from_wire(code, "prompt has 9 tokens, the limit is 8", "prompt")
    assert type(error) is REQUEST_ERRORS[code]
    assert (error.code, error.message, error.param, str(error)) == (code, error.message, "prompt", error.message)


def test_every_request_error_is_in_the_code_table() -> None:
    assert set(REQUEST_ERRORS.values()) == {kind for kind in ALL if issubclass(kind, RequestError)}


def test_unknown_code_of_a_newer_version_is_still_an_error() -> None:
    error = from_wire("invented_later", "no")
    assert (type(error), error.message, error.param) == (RequestError, "no", None)


@pytest.mark.parametrize("error", [from_wire("overloaded", "full", "x"), WorkerDied("execute", -9, "Traceback")])
def test_errors_can_be_serialised_and_restored(error: TriptychError) -> None:
    again = copy.copy(error)  # what serialisers of exceptions do
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    ("exit_code", "reason"), [(1, "ended with exit code 1"), (-9, "ended with exit code -9"), (None, "was stuck")]
)
def test_worker_died_contains_role_exit_code_and_last_log_lines(exit_code: int | None, reason: str) -> None:
    error = WorkerDied("execute", exit_code, "RuntimeError: no")
    assert error.message == f"worker execute {reason}; its last lines were:\nRuntimeError: no"
    assert (error.role, error.exit_code, error.stderr) == ("execute", exit_code, "RuntimeError: no")
