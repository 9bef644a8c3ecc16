"""The tokenizer in the run directory."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from triptych.protocol.errors import ConfigError
from triptych.protocol.tokenizer_files import FACTS_FILE, TOKENIZER_FILE, TokenizerFacts, load_facts, save_tokenizer

FACTS = TokenizerFacts(vocab_size=5, chat_template="{{ x }}", special_tokens={"bos_token": "<s>"}, bos_token_id=1)


def test_tokenizer_is_read_back(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, '{"model": "é"}', FACTS)
    assert load_facts(tmp_path) == FACTS
    assert json.loads((tmp_path / TOKENIZER_FILE).read_text(encoding="utf-8")) == {"model": "é"}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([TOKENIZER_FILE, FACTS_FILE])


def test_there_is_no_tokenizer_until_it_is_written(tmp_path: Path) -> None:
    assert load_facts(tmp_path) is None


def test_tokenizer_facts_are_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: fail() if Path(b).name == FACTS_FILE else replace(a, b))
    with pytest.raises(ConfigError, match="needs 2 bytes: No space left on device; use a --run-dir"):
        save_tokenizer(tmp_path, "{}", FACTS)
    assert (tmp_path / TOKENIZER_FILE).exists()
    assert load_facts(tmp_path) is None


def test_only_the_same_tokenizer_may_be_written_again(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "{}", FACTS)
    save_tokenizer(tmp_path, "{}", FACTS)
    with pytest.raises(ConfigError, match="another tokenizer"):
        save_tokenizer(tmp_path, '{"a": 1}', FACTS)
    assert (tmp_path / TOKENIZER_FILE).read_text() == "{}"


def fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
