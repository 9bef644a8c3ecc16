"""``triptych chat`` through a pipe."""

from __future__ import annotations

import pytest

from tests.launch.conftest import Outcome, Triptych
from triptych import Client
from triptych.launch.report import printable


@pytest.fixture
def chat(triptych: Triptych, run_dir: str) -> Triptych:
    """``chat("a line", "another")`` on the shared pipeline."""

    def call(*lines: str, flags: tuple[str, ...] = ()) -> Outcome:
        return triptych("chat", "--connect", run_dir, "--max-tokens", "4", *flags, stdin="\n".join(lines).encode())

    return call


def answers(run_dir: str, *questions: str, system: str | None = None) -> str:
    """What is said to the questions of one conversation, as the chat shows it."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    shown = ""
    with Client(run_dir) as client:
        for question in questions:
            messages.append({"role": "user", "content": question})
            text = client.generate(messages=messages, max_tokens=4).text
            messages.append({"role": "assistant", "content": text})
            shown += printable(text) + "\n"
    return shown


def test_the_model_is_told_the_whole_conversation(chat: Triptych, run_dir: str) -> None:
    assert chat("first", "second") == (0, answers(run_dir, "first", "second"), "")


def test_a_system_prompt_opens_the_conversation(chat: Triptych, run_dir: str) -> None:
    outcome = chat("first", flags=("--system", "be brief"))
    assert outcome.out == answers(run_dir, "first", system="be brief")


def test_reset_forgets_the_conversation(chat: Triptych, run_dir: str) -> None:
    outcome = chat("first", "/reset", "second")
    assert outcome.out == answers(run_dir, "first") + answers(run_dir, "second")


def test_stats_show_where_the_time_of_the_last_answer_went(chat: Triptych) -> None:
    outcome = chat("/stats", "first", "/stats")
    assert "no answer yet" in outcome.err
    for stage in ("tokenize", "decode", "detokenize", "= wall"):
        assert stage in outcome.err


@pytest.mark.parametrize("command", ["/quit", "/exit"])
def test_nothing_is_asked_after_quit(chat: Triptych, command: str) -> None:
    assert chat(command, "first") == (0, "", "")


def test_an_unknown_command_shows_the_list_and_is_not_asked(chat: Triptych) -> None:
    outcome = chat("/frobnicate")
    assert outcome.out == ""
    assert "/frobnicate is no command" in outcome.err
    assert "/reset" in outcome.err


def test_a_refused_question_is_forgotten(chat: Triptych, run_dir: str) -> None:
    outcome = chat("x" * 5000, "second")
    assert "(prompt_too_long)" in outcome.err
    assert outcome.out == answers(run_dir, "second")


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[31mb\x9b\x00\tc\n") == "a�[31mb��\tc\n"
