"""docs/cli.md: its reference is that of the code, and its commands are ones that the command line takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from triptych.launch.aliases import ALIASES, canonical
from triptych.launch.chat import COMMANDS
from triptych.launch.cli import app
from triptych.launch.reference import MARK, reference

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
HOW_TO = PAGE.partition(MARK)[0]
VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
CALLS = [line for block in re.findall(r"```sh\n(.*?)```", HOW_TO, re.DOTALL) for line in block.splitlines()]


def test_the_reference_is_that_of_the_code() -> None:
    assert PAGE.partition(MARK)[2].strip() == reference().strip(), "run python -m triptych.launch.reference docs/cli.md"


@pytest.mark.parametrize("call", CALLS)
def test_a_command_is_one_that_is_taken(call: str) -> None:
    program, verb, *arguments = shlex.split(call)
    assert program == "triptych"
    VERBS[verb].make_context(verb, arguments, token_normalize_func=canonical)


def test_the_config_file_is_one_that_is_taken(tmp_path: Path) -> None:
    [toml] = re.findall(r"```toml\n(.*?)```", HOW_TO, re.DOTALL)
    (tmp_path / "own.toml").write_text(toml)
    parent = typer.main.get_command(app).make_context("triptych", ["chat"])
    context = VERBS["chat"].make_context("chat", ["--config", str(tmp_path / "own.toml")], parent=parent)
    assert context.params["system"] == "Answer in one sentence."


def test_every_alias_is_in_the_table() -> None:
    assert [alias for alias in ALIASES if f"`--{alias}`" not in HOW_TO] == []


def test_every_command_of_a_chat_is_told() -> None:
    assert [command for command in COMMANDS if f"`{command}" not in HOW_TO] == []


def test_every_verb_is_shown() -> None:
    assert set(VERBS) <= set(re.findall(r"triptych (\w+)", HOW_TO))


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", HOW_TO))))
def test_a_link_leads_somewhere(target: str) -> None:
    assert (ROOT / "docs" / target).exists()
