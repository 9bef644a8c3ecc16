"""``triptych chat`` through a pipe."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.launch.conftest import Outcome, Triptych
from tests.launch.own_terminal import terminal
from tests.waiting import eventually
from triptych import Client
from triptych.launch.terminal.report import printable, say
from triptych.launch.verbs.chat import HELP


@pytest.fixture
def chat(triptych: Triptych, run_dir: str) -> Triptych:
    """``chat("a line", "another")`` on the shared pipeline."""

    def call(*lines: str, flags: tuple[str, ...] = ()) -> Outcome:
        return triptych("chat", "--connect", run_dir, "--max-tokens", "4", *flags, stdin="\n".join(lines).encode())

    return call


def answers(run_dir: str, *questions: str, system: str | None = None) -> str:
    """The answers to the questions of one conversation, as the chat shows them."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    shown = ""
    with Client(run_dir) as client:
        for question in questions:
            messages.append({"role": "user", "content": question})
            text = client.generate(messages=messages, max_tokens=4).text
            messages.append({"role": "assistant", "content": text})
            shown += printable(text) + "\n"
    return shown


def test_model_gets_the_whole_conversation(chat: Triptych, run_dir: str) -> None:
    assert chat("first", "second") == (0, answers(run_dir, "first", "second"), "")


def test_system_prompt_begins_the_conversation(chat: Triptych, run_dir: str) -> None:
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
def test_no_question_is_sent_after_quit(chat: Triptych, command: str) -> None:
    assert chat(command, "first") == (0, "", "")


def test_unknown_command_shows_the_list_and_is_not_sent(chat: Triptych) -> None:
    outcome = chat("/frobnicate")
    assert outcome.out == ""
    assert "/frobnicate is not a command" in outcome.err
    assert "/reset" in outcome.err


@pytest.mark.parametrize("flag", ["--n", "--logprobs"])
def test_what_a_chat_cannot_show_is_refused(chat: Triptych, flag: str) -> None:
    outcome = chat("first", flags=(flag, "2"))
    assert outcome == (2, "", f"error: {flag[2:]} is 2, but a chat shows one answer, without logprobs\n")


def test_refused_question_is_forgotten(chat: Triptych, run_dir: str) -> None:
    outcome = chat("x" * 5000, "second")
    assert "(prompt_too_long)" in outcome.err
    assert (outcome.out, outcome.code) == (answers(run_dir, "second"), 1)


def test_question_that_is_not_utf8_is_refused_and_the_next_one_answered(triptych: Triptych, run_dir: str) -> None:
    outcome = triptych("chat", "--connect", run_dir, "--max-tokens", "4", stdin=b"caf\xe9\nsecond")
    assert "the question is not UTF-8: byte 0xe9 after 3 others (invalid_request)" in outcome.err
    assert (outcome.out, outcome.code) == (answers(run_dir, "second"), 1)


def test_system_prompt_can_be_changed(chat: Triptych, run_dir: str) -> None:
    outcome = chat("/system", "/system be brief", "first", "/system -", "/reset", "second")
    assert outcome.out == answers(run_dir, "first", system="be brief") + answers(run_dir, "second")
    assert outcome.err.splitlines()[:2] == ["system: nothing", "system: be brief"]


@pytest.mark.parametrize(
    "lines", [("one\\", "two"), ('"""one', 'two"""'), ('"""', "one", "two", '"""')], ids=["backslash", "short", "block"]
)
def test_message_may_have_several_lines(chat: Triptych, run_dir: str, lines: tuple[str, ...]) -> None:
    assert chat(*lines) == (0, answers(run_dir, "one\ntwo"), "")


def test_unclosed_block_ends_with_the_input(chat: Triptych, run_dir: str) -> None:
    assert chat('"""one', "two").out == answers(run_dir, "one\ntwo")


def test_question_may_begin_with_a_slash(chat: Triptych, run_dir: str) -> None:
    assert chat("/etc/passwd is what?").out == answers(run_dir, "/etc/passwd is what?")


def test_conversation_is_saved(chat: Triptych, run_dir: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    outcome = chat("first", f"/save {file}", f"/save {file}", "/save", "/save ~none/a", flags=("--system", "s"))
    messages = json.loads(file.read_text())
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert outcome.err.splitlines() == [
        f"3 messages saved to {file}",
        f"cannot write {file}: File exists",
        "/save needs a file name",
        "cannot write ~none/a: No such file or directory",
    ]
    chat("first", f"/save {tmp_path / 'a.md'}")
    assert (tmp_path / "a.md").read_text().startswith("**user**\n\nfirst\n\n**assistant**\n\n")


# -- in a terminal


def test_conversation_in_a_terminal(run_dir: str, tmp_path: Path) -> None:
    arguments = ("chat", "--connect", run_dir, "--max-tokens", "6")
    with terminal(*arguments, XDG_STATE_HOME=str(tmp_path)) as screen:
        screen.see_prompt()
        screen.type("half a line\x03")  # cancelled, as in a shell
        screen.see("> ", times=2)
        screen.see_prompt()
        screen.type("/he\t\r")
        screen.see("where the time of the last answer went")
        screen.see_prompt()
        screen.type("hello\r")
        screen.see("6 tokens · first after")
        screen.see_prompt()
        screen.type("\x1b[A\x1b[A\x1b[B\r")  # up, up, down: hello again
        screen.see("6 tokens · first after", times=2)
        screen.see_prompt()
        screen.type("\x04")
        assert screen.wait() == 0
    history = tmp_path / "triptych" / "chat_history"
    assert history.read_text().splitlines()[-2:] == ["/help", "hello"]
    assert history.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_in_a_terminal_ends_only_the_answer(tmp_path: Path) -> None:
    slow = ("chat", "hash-lm", "--hash-step-ms", "5", "--max-tokens", "3000")
    with terminal(*slow, XDG_STATE_HOME=str(tmp_path)) as screen:
        screen.see_prompt()
        screen.type("hello\r")
        screen.see("hello")
        num_chars = len(screen.text)
        eventually(lambda: len(screen.text) > num_chars + 20)
        screen.type("\x03")
        screen.see("· abort")
        screen.see_prompt()
        screen.type("/quit\r")
        assert screen.wait() == 0


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[31mb\x9b\x00\tc\n") == "a�[31mb��\tc\n"


def test_lines_are_wrapped_between_words_on_a_narrow_terminal() -> None:
    written = io.StringIO()
    say(Console(file=written, force_terminal=True, color_system=None, width=40), HELP, is_wrapped=True)
    assert written.getvalue().split() == HELP.split()
    assert max(map(len, written.getvalue().splitlines())) <= 40


def test_help_fits_into_80_columns() -> None:
    assert [line for line in HELP.splitlines() if len(line) > 80] == []
