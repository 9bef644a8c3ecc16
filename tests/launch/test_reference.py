"""Generated pages match the code; the commands of docs/cli.md are accepted."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

from triptych.launch.cli import app
from triptych.launch.flags.aliases import canonical
from triptych.launch.gateway.config import GatewayConfig
from triptych.launch.reference.__main__ import PAGES, mark, whole
from triptych.launch.reference.api import CLASSES, about
from triptych.launch.reference.settings import limits
from triptych.launch.verbs.chat import COMMANDS
from triptych.protocol.config import PipelineConfig, SchedulerConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
HOW_TO = PAGE.partition(mark("cli.md"))[0]
VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
CALLS = [line for block in re.findall(r"```sh\n(.*?)```", HOW_TO, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("name", PAGES)
def test_reference_matches_the_code(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == whole(name, page), "run python -m triptych.launch.reference"


@pytest.mark.parametrize(
    "line",
    [
        "`triptych generate [PROMPTS]... [flags]`",
        "`triptych replay [FILE] [flags]`",
        "`triptych restart ROLE [flags]`",
        "| `--connect` | required | the run directory of the pipeline |",
        "`triptych keys add FOLDER NAME [flags]`",
        "| `--output`, `-o` |  | the client's file, by default NAME.json here |",
        "`triptych keys revoke FOLDER NAME`",
    ],
)
def test_reference_marks_required_parameters(line: str) -> None:
    assert line in PAGE.splitlines()


@pytest.mark.parametrize("owner", CLASSES, ids=lambda owner: owner.__name__)
def test_every_public_function_is_documented(owner: type) -> None:
    members = {name: member for name, member in vars(owner).items() if callable(member) or isinstance(member, property)}
    assert [name for name, member in members.items() if not name.startswith(("_", "on_")) and not about(member)] == []


def test_no_row_lists_its_choices_twice() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+, [^|]+) \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) > 9
    assert [name for name, choices, text in rows if choices in text] == []


def test_no_table_is_empty() -> None:
    assert not re.search(r"^\|---.*\|\n(?!\|)", PAGE, re.MULTILINE)


def test_every_field_of_a_configuration_is_listed() -> None:
    owners = [*get_type_hints(PipelineConfig).values(), GatewayConfig]
    names = [item.name for owner in owners for item in dataclasses.fields(owner)]
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == names


@pytest.mark.parametrize(
    ("owner", "name", "hint", "expected"),
    [
        (SchedulerConfig, "max_num_seqs", int, "1 to 65536"),
        (SchedulerConfig, "max_kv_reads", int | None, "from 1"),
        (SchedulerConfig, "policy", str, "fifo, prefill_first, round_robin, priority"),
        (SchedulerConfig, "trace", str | None, ""),
        (GatewayConfig, "body_timeout_s", float, "0.1 to 1000000"),
    ],
)
def test_documented_limits_are_those_of_the_error(owner: type, name: str, hint: Any, expected: str) -> None:
    assert limits(owner, name, hint) == expected


@pytest.mark.parametrize("call", CALLS)
def test_documented_command_is_accepted(call: str) -> None:
    program, verb, *arguments = shlex.split(call)
    assert program == "triptych"
    VERBS[verb].make_context(verb, arguments, token_normalize_func=canonical)


def test_documented_config_file_is_accepted(tmp_path: Path) -> None:
    [toml] = re.findall(r"```toml\n(.*?)```", HOW_TO, re.DOTALL)
    (tmp_path / "own.toml").write_text(toml)
    parent = typer.main.get_command(app).make_context("triptych", ["chat"])
    context = VERBS["chat"].make_context("chat", ["--config", str(tmp_path / "own.toml")], parent=parent)
    assert context.params["system"] == "Answer in one sentence."


def test_every_chat_command_is_documented() -> None:
    assert [command for command in COMMANDS if f"`{command}" not in HOW_TO] == []


def test_every_verb_is_documented() -> None:
    assert set(VERBS) <= set(re.findall(r"triptych ([\w-]+)", HOW_TO))


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", HOW_TO))))
def test_links_resolve(target: str) -> None:
    assert (ROOT / "docs" / target).exists()
