"""The tokenizer in the run directory."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from triptych.protocol.errors import ConfigError
from triptych.protocol.tokenizer_files import (
    FACTS_FILE,
    TOKENIZER_FILE,
    TokenizerFacts,
    is_same_tokenizer,
    load_facts,
    load_tokenizer_json,
    save_tokenizer,
)

FACTS = TokenizerFacts(vocab_size=5, chat_template="{{ x }}", special_tokens={"bos_token": "<s>"}, bos_token_id=1)


def test_tokenizer_is_read_back(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, '{"model": "é"}', FACTS)
    assert load_facts(tmp_path) == FACTS
    assert load_tokenizer_json(tmp_path) == '{"model": "é"}'
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([TOKENIZER_FILE, FACTS_FILE])


def test_there_is_no_tokenizer_until_it_is_written(tmp_path: Path) -> None:
    assert load_facts(tmp_path) is None


def test_tokenizer_facts_are_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: fail() if Path(b).name == FACTS_FILE else replace(a, b))
    with pytest.raises(ConfigError, match="needs 22 bytes: No space left on device; use a --run-dir"):
        save_tokenizer(tmp_path, "{}", FACTS)
    assert (tmp_path / TOKENIZER_FILE).exists()
    assert load_facts(tmp_path) is None


def test_only_the_same_tokenizer_may_be_written_again(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "{}", FACTS)
    save_tokenizer(tmp_path, "{}", FACTS)
    with pytest.raises(ConfigError, match="another tokenizer"):
        save_tokenizer(tmp_path, '{"a": 1}', FACTS)
    assert load_tokenizer_json(tmp_path) == "{}"


def test_same_tokenizer_has_the_same_files(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        save_tokenizer(folder, "{}", FACTS)
    assert is_same_tokenizer(one, other)
    for name in (TOKENIZER_FILE, FACTS_FILE):
        content = (other / name).read_bytes()
        (other / name).write_bytes(content + b" ")
        assert not is_same_tokenizer(one, other)
        (other / name).unlink()
        assert not is_same_tokenizer(one, other)
        (other / name).write_bytes(content)


def test_tokenizer_takes_half_its_size(tmp_path: Path) -> None:
    """A container of Docker has 14 MB beside the journal, and Gemma 3's is larger: it could not be served there."""
    vocab = json.dumps({f"{number:x}": number for number in range(100_000)})
    save_tokenizer(tmp_path, vocab, FACTS)
    assert (tmp_path / TOKENIZER_FILE).stat().st_size < len(vocab) / 2


@pytest.mark.parametrize(
    "damage",
    [lambda file: file[:-9], lambda file: b"{}", lambda file: file[:10] + b"\xff" * 12],
    ids=["torn", "plain", "overwritten"],
)
def test_damaged_tokenizer_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    save_tokenizer(tmp_path, "{}", FACTS)
    file = tmp_path / TOKENIZER_FILE
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=r"tokenizer\.json\.gz is damaged"):
        load_tokenizer_json(tmp_path)


def fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
