"""A wrong value in a variable or a file is refused with its location."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.conftest import Outcome, Triptych
from triptych.launch.gateway.command import main


def error_line(outcome: Outcome) -> str:
    """The error in one line, without the box around it."""
    assert outcome.code == 2
    return " ".join(outcome.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("NUM_PAGES", "many", "Invalid value for TRIPTYCH_NUM_PAGES in the environment: 'many' is not an integer"),
        ("NUM_PAGES", "1", "error: TRIPTYCH_NUM_PAGES in the environment: num_pages is 1, the limits are 2 and"),
        ("TEMPERATURE", "-1", "error: TRIPTYCH_TEMPERATURE in the environment: temperature is -1.0, the limits"),
        ("LOG_LEVEL", "loud", "error: TRIPTYCH_LOG_LEVEL in the environment: log_level is 'loud', known are"),
        ("LOGIT_BIAS", "7", "error: TRIPTYCH_LOGIT_BIAS in the environment: logit_bias is '7', the form is"),
        ("CONNECT", "/nowhere", "error: TRIPTYCH_CONNECT in the environment: --model: the pipeline at /nowhere is"),
        ("CONFIG", "/no.toml", "error: TRIPTYCH_CONFIG in the environment: cannot read /no.toml"),
        ("OVERLAP", "maybe", "for TRIPTYCH_OVERLAP in the environment: 'maybe' is neither true nor false"),
        ("CHAT", "maybe", "for TRIPTYCH_CHAT in the environment: 'maybe' is neither true nor false"),
        ("PREFIX_CACHE", "2", "for TRIPTYCH_PREFIX_CACHE in the environment: '2' is neither true nor false"),
    ],
)
def test_wrong_variable_is_refused_with_its_name(
    triptych: Triptych, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(f"TRIPTYCH_{variable}", value)
    assert words in error_line(triptych("generate", "hi", "--model", "hash-lm"))


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("num_pages = 'many'", "Invalid value for num_pages in own.toml: 'many' is not an integer"),
        ("num_pages = 1", "error: num_pages in own.toml: num_pages is 1, the limits are 2 and"),
        ("[info]\nlog_level = 'loud'", "error: log_level in own.toml: log_level is 'loud', known are"),
        ("overlap = 'maybe'", "Invalid value for overlap in own.toml: 'maybe' is neither true nor false"),
        ("overlap = 2", "Invalid value for overlap in own.toml: '2' is neither true nor false"),
        ("page_sise = 2", "error: own.toml: 'page_sise' is not a flag"),
    ],
)
def test_wrong_line_of_a_file_is_refused_with_the_file(
    triptych: Triptych, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, toml: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text(toml)
    assert words in error_line(triptych("info", "hash-lm", "--config", "own.toml"))


def test_gateway_of_a_running_pipeline_names_the_variable_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIPTYCH_HTTP_WORKERS", "100")
    monkeypatch.setattr("sys.argv", ["gateway", "--run-dir", "/nowhere"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "TRIPTYCH_HTTP_WORKERS in the environment: http_workers is 100, the limits" in capsys.readouterr().err


def test_error_in_a_flag_does_not_blame_the_environment(triptych: Triptych, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_NUM_PAGES", "64")
    monkeypatch.setenv("TRIPTYCH_MODEL", "hash-lm")
    assert error_line(triptych("info", "--num-pages", "1")).startswith("error: num_pages is 1")
    assert error_line(triptych("info", "")) == "error: model is empty"


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--uds", "No such option: --uds. Here: --http unix:PATH See docs/coming-from.md"),
        ("--alias", "No such option: --alias. Here: --served-model-name See docs/coming-from.md"),
        ("-np", "No such option: -np. Here: --max-num-seqs See docs/coming-from.md"),
        ("--max-modellen", "No such option: --max-modellen (Possible options: --draft-model, --max-model-len"),
    ],
)
def test_flag_of_another_server_is_answered_with_ours(triptych: Triptych, flag: str, words: str) -> None:
    assert words in error_line(triptych("serve", "hash-lm", flag, "1"))


def test_all_flags_of_another_server_are_answered_at_once(triptych: Triptych) -> None:
    command = ("--port", "1", "--uds", "0.0.0.0", "-tp", "2", "-ngl", "9", "--dtype", "--seed", "--frob=1", "--uds=a")
    words = (
        "No such option: --uds. Here: --http unix:PATH No such option: -ngl. Here: --device, of all layers"
        " No such option: --frob See docs/coming-from.md"
    )
    assert words in error_line(triptych("serve", "hash-lm", *command)), "--seed is the value of --dtype"


def test_command_of_another_program_is_answered_with_ours(triptych: Triptych) -> None:
    assert "No such command 'run'. Here: triptych chat --model MODEL" in error_line(triptych("run", "demo"))
    assert "No such command 'serv'. Did you mean 'serve'?" in error_line(triptych("serv", "demo"))


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        (("--host", "0.0.0.0", "--port", "99999"), "0.0.0.0:99999"),
        (("--port=99999",), ":99999"),
        (("--host", "::1", "--port", "99999"), "[::1]:99999"),
    ],
    ids=" ".join,
)
def test_host_and_port_of_other_servers_are_the_address(
    triptych: Triptych, flags: tuple[str, ...], address: str
) -> None:
    assert f"http is '{address}': port 99999" in error_line(triptych("serve", "hash-lm", *flags))


def test_host_alone_has_the_usual_port(triptych: Triptych) -> None:
    assert "cannot listen at 192.0.2.1:8000" in error_line(triptych("serve", "hash-lm", "--host", "192.0.2.1"))


def test_host_and_port_are_refused_beside_the_address_that_they_would_change(triptych: Triptych) -> None:
    assert "--port beside --http" in error_line(triptych("serve", "hash-lm", "--http", ":0", "--port", "1"))


def test_port_is_no_flag_where_nothing_listens(triptych: Triptych) -> None:
    assert "No such option: --port" in error_line(triptych("generate", "hi", "--port", "1"))
