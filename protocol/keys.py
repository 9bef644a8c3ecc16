"""Keys for ``tcp://``: a folder with the server's key pair and a file per admitted client, and each client's own.

Secrets are kept in files that only their owner can read, and never in a log, an argument or an environment variable. A
client's file may be passed as an inherited descriptor: ``/dev/fd/5``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .curve import new_key_pair
from .errors import ConfigError
from .plain import load_map
from .private_file import FOLDER_MODE, write_private

SERVER_FILE = "server.json"
CLIENTS_FOLDER = "clients"
OWN_KEYS_FILE = "client.json"  # in a run directory: keys of the driver's own client, usable by the same user's others
_VALID_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_VALID_KEY = re.compile(r"[\x21-\x7e]{40}")  # Z85
MAX_FILE_CHARS = 1 << 12
READ_AGAIN_S = 1.0
TICK_NS = 100_000_000  # much longer than a file system's timestamp granularity
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85, 40 characters each."""

    public: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        _check_keys(self.public, self.secret)

    @classmethod
    def new(cls) -> KeyPair:
        return cls(*new_key_pair())


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client needs: its own key pair, and the public key that identifies the server."""

    name: str
    server: str
    public: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        _check_keys(self.server, self.public, self.secret)

    @classmethod
    def read(cls, path: str | Path) -> ClientKeys:
        """
        Raises:
            ConfigError: the file is missing, accessible to others, or not a key file.
        """
        return _read(Path(path), lambda wire: cls(**wire))

    def write(self, path: Path) -> None:
        """Write the file, readable by its owner only; an existing one is not replaced.

        Raises:
            ConfigError: there already is one, or it cannot be written.
        """
        with _writing(path, "output"):
            if path.exists():
                raise ConfigError(f"{path} exists already", param="output")
            write_private(path, json.dumps(asdict(self), indent=1) + "\n")


class KeyFolder:
    """The server's side. A client with a file in ``clients/`` is admitted; once it is removed, no longer."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def create(self) -> None:
        """A new folder with a new key pair for the server.

        Raises:
            ConfigError: there already is one, or it cannot be written.
        """
        with _writing(self.path, "folder"):
            if (self.path / SERVER_FILE).exists():
                raise ConfigError(f"{self.path} has a server key already", param="folder")
            (self.path / CLIENTS_FOLDER).mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            self.path.chmod(FOLDER_MODE)
            write_private(self.path / SERVER_FILE, json.dumps(asdict(KeyPair.new()), indent=1) + "\n")

    @property
    def server(self) -> KeyPair:
        """
        Raises:
            ConfigError: it is missing, or others can read it.
        """
        return _read(self.path / SERVER_FILE, lambda wire: KeyPair(**wire))

    def add(self, name: str) -> ClientKeys:
        """A new client. Its secret is in the returned value and nowhere else.

        Raises:
            ConfigError: the name is malformed or taken, or the folder has no server key or cannot be written.
        """
        path = self._client(name)
        if path.exists():
            raise ConfigError(f"the client {name} has a key already, revoke it first", param="name")
        pair = KeyPair.new()
        server = self.server.public
        with _writing(path, "folder"):
            write_private(path, json.dumps({"public": pair.public}, indent=1) + "\n")
        return ClientKeys(name, server, pair.public, pair.secret)

    def revoke(self, name: str) -> None:
        """Stop admitting this client; a connection it has open stays until the workers restart.

        Raises:
            ConfigError: it is not known, or the folder cannot be written.
        """
        path = self._client(name)
        with _writing(path, "folder"):
            if not path.exists():
                raise ConfigError(f"no client {name} is known in {self.path}", param="name")
            path.unlink()

    def clients(self) -> dict[str, str]:
        """Public keys by name. Files that are not keys are skipped: they admit nobody."""
        found = {}
        for path in sorted((self.path / CLIENTS_FOLDER).glob("*.json")):
            with contextlib.suppress(ConfigError):
                found[path.stem] = _read(path, lambda wire: str(wire["public"]))
        return found

    @property
    def changed_ns(self) -> int:
        """When a file was last added or removed, by the file system's clock; -1 if there is no folder."""
        try:
            return (self.path / CLIENTS_FOLDER).stat().st_mtime_ns
        except OSError:
            return -1

    def _client(self, name: str) -> Path:
        if not _VALID_NAME.fullmatch(name):
            raise ConfigError(
                f"name is {name!r:.100}, it must be 1 to 64 letters, digits, dots, dashes or underscores", param="name"
            )
        return self.path / CLIENTS_FOLDER / f"{name}.json"


def own_keys(run_dir: Path) -> ClientKeys | None:
    """The keys for the pipeline of this run directory; None if it needs none.

    Raises:
        ConfigError: they cannot be read, as those in another user's folder.
    """
    try:
        return ClientKeys.read(run_dir / OWN_KEYS_FILE)
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def make_own_keys(run_dir: Path, folder: KeyFolder) -> None:
    """Keys of the run directory: whoever can read it may be a client.

    Those of an earlier driver stay valid: its clients have read them once, and would never be admitted again.
    """
    server = folder.server.public
    with contextlib.suppress(ConfigError):  # damaged, or accessible to others: replaced
        if (own := own_keys(run_dir)) is not None and own.server == server:
            return
    pair = KeyPair.new()
    keys = ClientKeys("driver", server, pair.public, pair.secret)
    write_private(run_dir / OWN_KEYS_FILE, json.dumps(asdict(keys)))


def allow_list(folder: KeyFolder, run_dir: Path) -> Callable[[str], bool]:
    """Whether a public key is admitted: asked at each handshake, so that ``revoke`` takes effect without a restart."""
    listed = _Listed(folder)

    def allows(public: str) -> bool:
        if public in listed.current():
            return True
        own = own_keys(run_dir)
        return own is not None and own.public == public

    return allows


class _Listed:
    """The clients' public keys, cached: anyone may trigger lookups, and a thousand files take long to read.

    Invariant: clients added or revoked before a call are reflected in its result. A file changed in place, which does
    not alter the folder's mtime, is read again within ``READ_AGAIN_S``.
    """

    def __init__(self, folder: KeyFolder) -> None:
        self._folder = folder
        self._keys: frozenset[str] = frozenset()
        self._changed_ns = -1  # the folder's mtime when they were read; -1: unreliable
        self._read_at = 0.0

    def current(self) -> frozenset[str]:
        changed_ns = self._folder.changed_ns
        if changed_ns != self._changed_ns or time.monotonic() >= self._read_at + READ_AGAIN_S:
            now_ns, self._read_at = time.time_ns(), time.monotonic()
            self._keys = frozenset(self._folder.clients().values())
            # Timestamps are coarse: a change within the tick of this reading could not be told apart from it.
            self._changed_ns = changed_ns if changed_ns < now_ns - TICK_NS else -1
        return self._keys


def _check_keys(*keys: str) -> None:
    for key in keys:
        if type(key) is not str or not _VALID_KEY.fullmatch(key):
            raise ConfigError("a key must be 40 characters of Z85")


@contextlib.contextmanager
def _writing(path: Path, param: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", param=param) from error


def _read(path: Path, make: Callable[[dict[str, Any]], T]) -> T:
    try:
        with open(path, encoding="utf-8") as file:
            facts = os.fstat(file.fileno())
            is_file = stat.S_ISREG(facts.st_mode)
            if is_file and facts.st_mode & 0o077:
                raise ConfigError(f"{path} must be readable by its owner only, its mode is {facts.st_mode & 0o777:o}")
            if is_file and facts.st_uid != os.getuid():
                raise ConfigError(f"{path} belongs to user {facts.st_uid}, not to {os.getuid()}")
            return make(load_map(file.read(MAX_FILE_CHARS), str(path)))
    except OSError as error:
        raise ConfigError(f"no key file {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:  # never the text itself: it may hold a secret
        raise ConfigError(f"{path} is not a key file: {type(error).__name__}") from None
