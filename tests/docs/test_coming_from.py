"""docs/coming-from.md: its flags, routes and fields match the code, and its program runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.docs.pages import assert_no_text_is_blank, blocks, read, run_borrowed, table
from tests.launch.gateway.conftest import Site, site
from triptych import Driver
from triptych.launch.cli import app
from triptych.launch.flags.aliases import ADDRESS, ALIASES, INSTEAD, OF_TGI, canonical

PAGE = read("coming-from.md")
[PROGRAM] = blocks("coming-from.md", "python")
FLAGS = table("coming-from.md", "Flags")[1:]
ROUTES = {row[0]: row[1] for row in table("coming-from.md", "Routes")[1:]}
FIELDS = table("coming-from.md", "Fields of a request")[1:]
VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OURS = {flag for verb in ("serve", "generate") for p in VERBS[verb].params for flag in (*p.opts, *p.secondary_opts)}
OF_OTHERS = [cell for row in FLAGS for cell in row[1:]]
OF_CHATS = (
    "reasoning_effort", "separate_reasoning", "include_reasoning", "thinking_token_budget", "chat_template",
    "continue_final_message",
)  # fmt: skip
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
VALUES: dict[str, Any] = {  # values that request something; 1 for all others
    "min_p": 0.1,
    "ignore_eos": True,
    "stop_token_ids": [7],
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "return_token_ids": True,
    "cache_salt": "a",
    "request_id": "a",
    "structured_outputs": {"choice": ["yes", "no"]},
    "guided_choice": ["yes", "no"],
    "regex": "a",
    "bad_words": ["a"],
    "allowed_token_ids": [7],
    "logits_processors": ["a"],
    "use_beam_search": True,
    "lora_path": "a",
    "return_hidden_states": True,
    "reasoning_effort": "high",
    "separate_reasoning": False,
    "include_reasoning": False,
    "continue_final_message": True,
    "chat_template": "a",
    "resumable": True,
    "cache_prompt": True,
    "deadline_ms": 60_000,
    "max_queue_ms": 60_000,
}


def flags_in(cell: str) -> list[str]:
    return re.findall(r"`(--?[\w-]+)[^`]*`", cell)


def is_understood(flag: str) -> bool:
    return flag in OURS or flag in ADDRESS or (flag.startswith("--") and f"--{canonical(flag[2:])}" in OURS)


@pytest.fixture(scope="module")
def api(driver: Driver) -> Iterator[Site]:
    with site(driver.run_dir) as api:
        yield api


@pytest.mark.parametrize("cell", [row[0] for row in FLAGS])
def test_flag_of_ours_exists(cell: str) -> None:
    assert [flag for flag in flags_in(cell) if flag not in OURS] == []


@pytest.mark.parametrize(
    "flag", sorted({flag for text in re.findall(r"\*\*(.*?)\*\*", PAGE) for flag in flags_in(text)})
)
def test_flag_in_bold_is_accepted(flag: str) -> None:
    assert is_understood(flag)


def test_accepted_flag_is_in_bold() -> None:
    plain = {flag for cell in OF_OTHERS for flag in flags_in(re.sub(r"\*\*.*?\*\*", "", cell))}
    of_generate = {"--seed", "--top-k", "--top-p", "--min-p"}  # a server's are not in Triptych
    others = {"--config", "--host"}  # the files differ; not for llama.cpp's PATH.sock
    assert {flag for flag in plain if is_understood(flag)} <= others | of_generate


def test_every_alias_is_on_the_page_beside_our_own_name() -> None:
    rows = {flag: row[0] for row in FLAGS for cell in row[1:] for flag in flags_in(cell)}
    assert {alias: f"--{own}" in rows.get(f"--{alias}", "") for alias, own in ALIASES.items()} == dict.fromkeys(
        ALIASES, True
    )


def test_errors_name_the_equivalent_of_every_flag_that_is_not_accepted() -> None:
    plain = {
        flag.lstrip("-"): re.sub(r"`|\[|\]\(.*\)", "", row[0])
        for row in FLAGS
        for cell in row[1:]
        for flag in flags_in(re.sub(r"\*\*.*?\*\*", "", cell))
        if row[0] == "a field of each request" or not is_understood(flag)
    }
    assert plain.keys() == INSTEAD.keys() - OF_TGI.keys()
    several = {"speculative-config"}  # in two rows
    assert {flag for flag, text in INSTEAD.items() if text.split(",")[0] not in plain.get(flag, text)} == several


@pytest.mark.parametrize(("flag", "ours"), OF_TGI.items())
def test_flags_of_tgi_are_on_the_page_after_our_own(flag: str, ours: str) -> None:
    own = ours.split(",")[0]
    assert re.search(rf"`{own}`\s+`--{flag}`", PAGE)


THERE = [route for cell, here in ROUTES.items() if here.startswith("yes") for route in re.findall(r"`([^`{]*)`", cell)]


@pytest.mark.parametrize("route", THERE)
def test_listed_route_exists(api: Site, route: str) -> None:
    assert api.http.get(route).status_code in (200, 405)


@pytest.mark.parametrize("cell", [cell for cell, here in ROUTES.items() if here.startswith("404")])
def test_route_listed_as_missing_is_a_404(api: Site, cell: str) -> None:
    status, error = api.refusal(cell.strip("`"), prompt="hi")
    assert (status, error["code"]) == (404, "unknown_route")


@pytest.mark.parametrize("row", FIELDS, ids=lambda row: row[0].split("`")[1])
def test_field_is_accepted_or_refused_as_documented(api: Site, row: list[str]) -> None:
    for name in re.findall(r"`(\w+)`", row[0].replace("`timings`", "")):
        route = "chat/completions" if name in OF_CHATS else "completions"
        prompt = {"messages": CHAT} if route[:4] == "chat" else {"prompt": "hi"}
        reply = api.post(f"/v1/{route}", **prompt, max_tokens=2, **{name: VALUES.get(name, 1)})
        if row[2].startswith("400"):
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
        else:
            assert reply.status_code == 200, (name, reply.text)


def test_every_reply_accounts_for_its_time(api: Site) -> None:
    assert api.ask("/v1/completions", prompt="hi", max_tokens=2)["usage"]["triptych"]["ledgers"]


def test_program_runs(demo_driver: Driver, tmp_path: Path) -> None:
    lines = run_borrowed(PROGRAM.text, tmp_path, demo_driver).splitlines()
    assert [len(line.split()) > 2 for line in lines[:2]] == [True, True], "an id and a text"
    assert_no_text_is_blank(lines[-1])
