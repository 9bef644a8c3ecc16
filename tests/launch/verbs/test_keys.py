"""``triptych keys``, from a shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.launch.cli import main
from triptych.protocol.keys import ClientKeys, KeyFolder


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


def test_folder_is_created_and_a_client_added_listed_and_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "keys", tmp_path / "alice.json"
    assert run("keys", "init", folder) == 0
    assert run("keys", "add", folder, "alice", "--output", file) == 0
    keys = ClientKeys.read(file)
    assert run("keys", "list", folder) == 0
    shown = capsys.readouterr().out
    assert f"alice  {keys.public}" in shown
    assert keys.secret not in shown
    assert run("keys", "revoke", folder, "alice") == 0
    assert KeyFolder(folder).clients() == {}


def test_existing_file_is_not_overwritten_and_no_client_is_added(tmp_path: Path) -> None:
    (tmp_path / "alice.json").write_text("mine")
    assert run("keys", "init", tmp_path / "keys") == 0
    assert run("keys", "add", tmp_path / "keys", "alice", "--output", tmp_path / "alice.json") == 2
    assert KeyFolder(tmp_path / "keys").clients() == {}
    assert (tmp_path / "alice.json").read_text() == "mine"


def test_folder_without_keys_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("keys", "list", tmp_path) == 2
    assert "no key file" in capsys.readouterr().err


def test_client_whose_file_cannot_be_written_is_not_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "missing" / "alice.json"
    assert run("keys", "init", tmp_path / "keys") == 0
    assert run("keys", "add", tmp_path / "keys", "alice", "--output", file) == 2
    assert f"cannot write {file}: No such file or directory" in capsys.readouterr().err
    assert KeyFolder(tmp_path / "keys").clients() == {}


def test_folder_that_cannot_be_created_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run("keys", "init", tmp_path / "file" / "keys") == 2
    assert "cannot write" in capsys.readouterr().err
