"""Key files are created, passed on and revoked, and refused if others could have read them."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from triptych.protocol.errors import ConfigError
from triptych.protocol.keys import (
    OWN_KEYS_FILE,
    READ_AGAIN_S,
    SERVER_FILE,
    ClientKeys,
    KeyFolder,
    KeyPair,
    allow_list,
    make_own_keys,
    own_keys,
)


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    folder = KeyFolder(tmp_path / "keys")
    folder.create()
    return folder


def test_all_files_are_readable_by_their_owner_only(folder: KeyFolder, tmp_path: Path) -> None:
    folder.add("alice").write(tmp_path / "alice.json")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert folder.path.stat().st_mode & 0o777 == 0o700


def test_client_secret_is_only_in_its_own_file(folder: KeyFolder) -> None:
    keys = folder.add("alice")
    assert not any(keys.secret in path.read_text() for path in folder.path.rglob("*.json"))


def test_secret_is_not_shown(folder: KeyFolder) -> None:
    keys = folder.add("alice")
    assert keys.secret not in repr(keys)
    assert folder.server.secret not in repr(folder.server)


def test_written_keys_are_read_back(folder: KeyFolder, tmp_path: Path) -> None:
    keys = folder.add("alice")
    keys.write(tmp_path / "file")
    assert ClientKeys.read(tmp_path / "file") == keys


def test_keys_can_be_read_from_an_inherited_descriptor(folder: KeyFolder, tmp_path: Path) -> None:
    keys = folder.add("alice")
    keys.write(tmp_path / "file")
    reader, writer = os.pipe()
    os.write(writer, (tmp_path / "file").read_bytes())
    os.close(writer)
    assert ClientKeys.read(f"/dev/fd/{reader}") == keys
    os.close(reader)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_file_readable_by_others_is_refused(folder: KeyFolder, tmp_path: Path, mode: int) -> None:
    folder.add("alice").write(tmp_path / "file")
    (tmp_path / "file").chmod(mode)
    with pytest.raises(ConfigError, match=f"mode is {mode:o}"):
        ClientKeys.read(tmp_path / "file")


def test_file_of_another_user_is_refused_as_such(
    folder: KeyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a container's root is given a user's folder."""
    folder.add("alice").write(tmp_path / "file")
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"file belongs to user {owner}, not to {owner + 1}"):
        ClientKeys.read(tmp_path / "file")


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"public": 1}', '{"a": 2}', "\x00", "{" * 5000])
def test_file_without_a_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"is not a key file|is not JSON|must be a map"):
        ClientKeys.read(path)


def test_missing_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        ClientKeys.read(tmp_path / "nowhere")


def test_existing_keys_are_not_replaced(folder: KeyFolder, tmp_path: Path) -> None:
    keys = folder.add("alice")
    keys.write(tmp_path / "file")
    for act in (folder.create, lambda: folder.add("alice"), lambda: keys.write(tmp_path / "file")):
        with pytest.raises(ConfigError):
            act()


@pytest.mark.parametrize("name", ["", "../server", "a/b", "x" * 65, "a b", "\n"])
def test_name_that_is_not_a_file_name_is_refused(folder: KeyFolder, name: str) -> None:
    with pytest.raises(ConfigError, match="name is"):
        folder.add(name)


def test_revoked_client_is_not_on_the_list(folder: KeyFolder, tmp_path: Path) -> None:
    allows = allow_list(folder, tmp_path)
    keys = folder.add("alice")
    assert allows(keys.public)
    folder.revoke("alice")
    assert not allows(keys.public)
    with pytest.raises(ConfigError, match="no client alice"):
        folder.revoke("alice")


def test_damaged_entry_admits_nobody_and_locks_nobody_out(folder: KeyFolder, tmp_path: Path) -> None:
    keys = folder.add("alice")
    (folder.path / "clients" / "bob.json").write_text("{")
    assert folder.clients() == {"alice": keys.public}


def test_owner_of_the_run_directory_is_on_the_list(folder: KeyFolder, tmp_path: Path) -> None:
    assert own_keys(tmp_path) is None
    make_own_keys(tmp_path, folder)
    own = own_keys(tmp_path)
    assert own is not None
    assert allow_list(folder, tmp_path)(own.public)
    assert not allow_list(folder, tmp_path)(KeyPair.new().public)


def test_keys_of_the_run_directory_stay_valid_under_the_next_driver(folder: KeyFolder, tmp_path: Path) -> None:
    """A client that is connected has read them once, and is to go on after a restart of the driver."""
    make_own_keys(tmp_path, folder)
    first = own_keys(tmp_path)
    make_own_keys(tmp_path, folder)
    assert own_keys(tmp_path) == first


@pytest.mark.parametrize("folder_is", ["a file", "closed"])
def test_run_directory_whose_keys_cannot_be_looked_up_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder_is: str
) -> None:
    """As that of another user. It is not one without keys, in which a client waits for a driver."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "run").touch()
    if folder_is == "closed":
        monkeypatch.setattr(os, "stat", refuse)
        monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ConfigError, match=r"no key file .*/run/client.json: (Not a directory|Permission denied)"):
        own_keys(tmp_path / "run")


@pytest.mark.parametrize("damage", ["text", "server", "mode"])
def test_unusable_keys_of_the_run_directory_are_replaced(folder: KeyFolder, tmp_path: Path, damage: str) -> None:
    make_own_keys(tmp_path, folder)
    first, file = own_keys(tmp_path), tmp_path / OWN_KEYS_FILE
    if damage == "text":
        file.write_text("{")
    elif damage == "mode":
        file.chmod(0o644)
    else:
        (folder.path / SERVER_FILE).unlink()
        folder.create()
    make_own_keys(tmp_path, folder)
    second = own_keys(tmp_path)
    assert second is not None
    assert second != first
    assert second.server == folder.server.public


def test_handshakes_of_strangers_do_not_reread_every_file(
    folder: KeyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, reads = folder.add("alice"), list[int]()
    make_old(folder)
    clients = KeyFolder.clients

    def counted(folder: KeyFolder) -> dict[str, str]:
        reads.append(1)
        return clients(folder)

    monkeypatch.setattr(KeyFolder, "clients", counted)
    allows = allow_list(folder, tmp_path)
    for _ in range(50):
        assert allows(keys.public)
        assert not allows(KeyPair.new().public)
    assert len(reads) <= 3, "one, and one a second"


def test_added_and_revoked_clients_are_known_at_once(folder: KeyFolder, tmp_path: Path) -> None:
    allows = allow_list(folder, tmp_path)
    for number in range(100):
        keys = folder.add(f"client-{number}")
        assert allows(keys.public)
        folder.revoke(f"client-{number}")
        assert not allows(keys.public)


def test_key_changed_in_place_is_noticed_soon(
    folder: KeyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, allows = folder.add("alice"), allow_list(folder, tmp_path)
    make_old(folder)
    assert allows(keys.public)
    (folder.path / "clients" / "alice.json").write_text("{")
    now = time.monotonic() + READ_AGAIN_S
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert not allows(keys.public)


def make_old(folder: KeyFolder) -> None:
    """Date the folder back, as if it had not changed for long."""
    os.utime(folder.path / "clients", (1e9, 1e9))
