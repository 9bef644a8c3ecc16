"""``--config FILE``: what it may contain, its precedence, and the errors for wrong keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import Outcome, Triptych

Row = dict[str, Any]


@pytest.fixture
def generate(triptych: Triptych, run_dir: str, tmp_path: Path) -> Callable[..., Outcome]:
    """Run the verb on the shared pipeline, with a config file of this text."""

    def call(toml: str, *arguments: str) -> Outcome:
        (tmp_path / "own.toml").write_text(toml)
        call = ("generate", "hi", "--config", str(tmp_path / "own.toml"), "--connect", run_dir, "--format", "jsonl")
        return triptych(*call, *arguments)

    return call


def num_tokens(outcome: Outcome) -> int:
    assert outcome.err == ""
    row: Row = json.loads(outcome.out)
    return len(row["token_ids"])


@pytest.mark.parametrize("key", ["max_tokens", "max-tokens", "max_new_tokens"])
def test_key_is_the_name_of_a_flag(generate: Callable[..., Outcome], key: str) -> None:
    assert num_tokens(generate(f"{key} = 3")) == 3


def test_flag_wins_over_environment_over_file_over_default(
    generate: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = "max_tokens = 3"
    monkeypatch.setenv("TRIPTYCH_MAX_TOKENS", "4")
    assert num_tokens(generate(toml, "--max-tokens", "5")) == 5
    assert num_tokens(generate(toml)) == 4
    monkeypatch.delenv("TRIPTYCH_MAX_TOKENS")
    assert num_tokens(generate(toml)) == 3
    assert num_tokens(generate("")) == 256


def test_table_applies_to_its_verb_only(generate: Callable[..., Outcome]) -> None:
    assert num_tokens(generate("max_tokens = 3\n[generate]\nmax_tokens = 4\n[chat]\nmax_tokens = 5")) == 4
    assert num_tokens(generate("drain_timeout = 9\nmax_tokens = 3")) == 3  # a setting of serve


def test_lists_maps_and_booleans_use_toml_syntax(generate: Callable[..., Outcome]) -> None:
    toml = "max_tokens = 3\nstop = ['q', 'r']\nlogit_bias = { 7 = -1.5 }\nignore_eos = true\nprefix_cache = false"
    assert num_tokens(generate(toml)) <= 3


def test_file_may_be_named_by_the_environment(
    triptych: Triptych, run_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.toml").write_text(f"max_tokens = 2\nconnect = '{run_dir}'\nformat = 'jsonl'")
    monkeypatch.setenv("TRIPTYCH_CONFIG", str(tmp_path / "own.toml"))
    assert num_tokens(triptych("generate", "hi")) == 2


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("page_sise = 32", "'page_sise' is not a flag; did you mean page_size?"),
        ("[generate]\ndrain_timeout = 3", "'drain_timeout' of [generate] is not a flag"),
        ("[frobnicate]\na = 1", "'frobnicate' is not a flag"),
        ("page_size = 32\nblock_size = 16", "page_size is given twice"),
        ("page_size = 32.5", "'32.5' is not an integer"),
        ("page_size = true", "'true' is not an integer"),
        ("page_size = [32]", "page_size is [32], it must be a single value"),
        ("model = ['demo']", "model is ['demo'], it must be a single value"),
        ("temperature = { a = 1 }", "temperature is {'a': 1}, it must be a single value"),
        ("stop = 'q'", "stop is 'q', it must be a list"),
        ("page_size = 5", "page_size is 5, it must be a power of two from 1 to 4096"),
        ("temperature = -1", "temperature is -1.0, the limits are 0.0 and 100.0"),
        ("page_size", "is not TOML"),
    ],
    ids=[
        "misspelt",
        "other verb",
        "table",
        "twice",
        "fraction",
        "boolean",
        "list",
        "list for a text",
        "table for a number",
        "no list",
        "limit",
        "sampling",
        "syntax",
    ],
)
def test_wrong_key_or_value_is_refused_with_its_name(generate: Callable[..., Outcome], toml: str, words: str) -> None:
    outcome = generate(toml)
    assert outcome.code == 2
    assert words in " ".join(outcome.err.replace("│", " ").split())


def test_unreadable_file_is_named(triptych: Triptych, tmp_path: Path) -> None:
    outcome = triptych("generate", "hi", "--config", tmp_path / "none.toml")
    assert outcome.code == 2
    assert f"cannot read {tmp_path}/none.toml: No such file or directory" in outcome.err


def test_byte_order_mark_is_ignored(triptych: Triptych, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("page_size = 7", encoding="utf-8-sig")
    outcome = triptych("generate", "hi", "--config", tmp_path / "own.toml")
    assert (outcome.code, "page_size is 7" in outcome.err) == (2, True)


def test_utf16_file_is_refused_as_such(triptych: Triptych, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("page_size = 32", encoding="utf-16")
    outcome = triptych("generate", "hi", "--config", tmp_path / "own.toml")
    assert (outcome.code, "own.toml is UTF-16, not UTF-8; iconv" in outcome.err) == (2, True)
