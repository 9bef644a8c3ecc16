"""The private folder of one pipeline: sockets, journal, board and logs. One driver at a time, proven by a lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TypeGuard

from .channels import ipc_endpoint
from .config import ServiceConfig
from .errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
CONFIG_FILE = "config.json"
CARD_FILE = "model_card.json"
LOCK_FILE = "lock"
MODE = 0o700


class RunDir:
    """A locked run directory. The lock goes with the process that holds it, however it ends."""

    def __init__(self, path: Path | None = None) -> None:
        """
        Raises:
            ConfigError: the folder belongs to somebody else, is open to others, or another driver runs in it.
        """
        self.is_temporary = path is None
        self.path = _make_temporary() if path is None else _make(path)
        self._lock = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError(f"another driver runs in {self.path}", param="run_dir") from error

    def remove_sockets(self) -> None:
        """ZeroMQ leaves their files behind. Nobody listens there any more: the lock is ours, the workers are gone."""
        for path in self.path.iterdir():
            if path.is_socket():
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the folder with all that is in it, and let go of it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.unlock()

    def unlock(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._lock)


def submit_endpoint(run_dir: Path, service: ServiceConfig) -> str:
    """Where clients on this machine connect; one on tcp:// is beside it, not in its place."""
    return service.submit if _is_ipc(service.submit) else ipc_endpoint(run_dir / "submit")


def follow_endpoint(run_dir: Path, service: ServiceConfig) -> str:
    return service.follow if _is_ipc(service.follow) else ipc_endpoint(run_dir / "follow")


def _is_ipc(endpoint: str | None) -> TypeGuard[str]:
    return endpoint is not None and endpoint.startswith("ipc://")


def journal_path(run_dir: Path, service: ServiceConfig) -> Path:
    return Path(service.journal) if service.journal else run_dir / "journal"


def board_path(run_dir: Path) -> Path:
    return run_dir / "board"


def control_path(run_dir: Path) -> Path:
    """
    Raises:
        ConfigError: the path is too long for a Unix socket.
    """
    ipc_endpoint(run_dir / "control")
    return run_dir / "control"


def write_private(path: Path, text: str) -> None:
    """Put a file there whole or not at all, readable by its owner only."""
    temporary = path.with_name(path.name + ".tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def _make_temporary() -> Path:
    # Shared memory, because the journal in it shall outlive any process and cost no disk.
    root = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else None
    return Path(tempfile.mkdtemp(prefix="triptych-", dir=root))


def _make(path: Path) -> Path:
    path = path.expanduser().absolute()
    path.mkdir(mode=MODE, parents=True, exist_ok=True)
    facts = path.stat()
    if facts.st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to user {facts.st_uid}, not to {os.getuid()}", param="run_dir")
    if facts.st_mode & 0o077:
        raise ConfigError(f"{path} has mode {facts.st_mode & 0o777:o}, it must be {MODE:o}", param="run_dir")
    return path
