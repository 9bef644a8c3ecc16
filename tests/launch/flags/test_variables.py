"""Environment variables that have no effect are reported."""

from __future__ import annotations

import pytest

from tests.launch.conftest import Triptych
from triptych.launch.flags.variables import complaints

KNOWN = {"TRIPTYCH_PAGE_SIZE", "TRIPTYCH_MAX_NUM_SEQS", "TRIPTYCH_API_KEY"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("TRIPTYCH_PAGE_SIZ", "; did you mean TRIPTYCH_PAGE_SIZE?"),
        ("TRIPTYCH_BLOCK_SIZE", "; did you mean TRIPTYCH_PAGE_SIZE?"),
        ("TRIPTYCH_QUUX", ""),
    ],
)
def test_variable_that_is_not_a_flag_is_named(name: str, hint: str) -> None:
    assert list(complaints([name], KNOWN)) == [f"{name} in the environment is not a flag{hint}"]


@pytest.mark.parametrize(
    "name",
    [
        "TRIPTYCH_API_KEY",
        "TRIPTYCH_PEERS",
        "TRIPTYCH_SERVICE_HOST",
        "TRIPTYCH_SERVICE_PORT_HTTP",
        "TRIPTYCH_PORT",
        "TRIPTYCH_PORT_8000_TCP_ADDR",
        "_TRIPTYCH_COMPLETE",
        "PAGE_SIZE",
    ],
)
def test_variables_read_elsewhere_are_accepted(name: str) -> None:
    assert list(complaints([name], KNOWN)) == []


def test_verb_warns_and_continues(triptych: Triptych, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_PAGE_SIZ", "3")
    monkeypatch.setenv("TRIPTYCH_PAGE_SIZE", "32")
    monkeypatch.setenv("TRIPTYCH_HTTP", ":8000")  # of another verb
    code, out, errors = triptych("generate", "hello", "--connect", run_dir, "--max-tokens", "2")
    assert (code, out != "") == (0, True)
    assert errors.count("not a flag") == errors.count("did you mean TRIPTYCH_PAGE_SIZE?") == 1
