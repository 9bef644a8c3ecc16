"""``~`` in paths, and what is told about what is there."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from triptych.driver.client import Client
from triptych.driver.driver import Driver
from triptych.protocol.errors import ConfigError
from triptych.protocol.home import from_home, mode_of
from triptych.protocol.lora import parse_modules


def test_home_directory_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/some/where")
    assert from_home("~/a", param="run_dir") == Path("/some/where/a")
    assert from_home("a/~", param="run_dir") == Path("a/~")


def test_unknown_user_is_refused() -> None:
    with pytest.raises(ConfigError, match="run_dir is '~nobody-at-all/a': the home directory is not known"):
        Driver("hash-lm", run_dir="~nobody-at-all/a").start()
    with pytest.raises(ConfigError, match="run_dir is"):
        Client("~nobody-at-all/a")
    with pytest.raises(ConfigError, match="lora_modules is"):
        parse_modules(("a=~nobody-at-all/a",))


def test_what_cannot_be_looked_at_is_told_from_what_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert [mode_of(tmp_path / "none"), mode_of(file / "none")] == [None, None]
    assert [stat.S_ISDIR(mode_of(path) or 0) for path in (tmp_path, file)] == [True, False]
    with pytest.raises(OSError, match="name too long"):
        mode_of(tmp_path / ("x" * 300))
