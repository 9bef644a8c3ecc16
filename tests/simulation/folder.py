"""The run directory in memory: each read and each change of a file is an act of a process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from triptych.protocol.model_card import OFFERED_FILE, ModelCard, Offer

if TYPE_CHECKING:
    from tests.simulation.processes import Process

    Owner: TypeAlias = "Process | Unhindered"


class Unhindered:
    """An owner whose file accesses are not acts."""

    def act(self, what: str) -> None:
        pass

    def stall(self) -> None:
        pass


class Disk:
    """File contents by path, each with a unique number."""

    def __init__(self, has_changed: Callable[[], None] = lambda: None) -> None:
        self.files: dict[str, tuple[str, int]] = {}
        self._versions = itertools.count(1)
        self._has_changed = has_changed  # called after each change

    def read(self, path: str) -> str | None:
        return self.files[path][0] if path in self.files else None

    def write(self, path: str, text: str) -> None:
        self.files[path] = text, next(self._versions)
        self._has_changed()

    def remove(self, path: str) -> None:
        if self.files.pop(path, None) is not None:
            self._has_changed()


class Folder:
    """The part of ``pathlib.Path`` used by the pipeline, as one process sees it."""

    def __init__(self, disk: Disk, path: str, owner: Owner) -> None:
        self._disk, self._path, self.owner = disk, path, owner

    def __truediv__(self, name: str) -> Folder:
        return Folder(self._disk, f"{self._path}/{name}", self.owner)

    def __str__(self) -> str:
        return self._path

    __fspath__ = __str__  # for the names of sockets

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    def with_name(self, name: str) -> Folder:
        return Folder(self._disk, f"{self._path.rpartition('/')[0]}/{name}", self.owner)

    def exists(self) -> bool:
        self.owner.act("load")
        return self._path in self._disk.files

    def stat(self) -> Any:
        version = self._get()[1]
        return SimpleNamespace(st_ino=version, st_mtime_ns=0)

    def read_text(self, encoding: str, errors: str = "strict") -> str:
        return self._get()[0]

    def _get(self) -> tuple[str, int]:
        self.owner.act("load")
        found = self._disk.files.get(self._path)
        self.owner.stall()
        if found is None:
            raise FileNotFoundError(self._path)
        return found

    def write(self, text: str) -> None:
        """All of it or nothing."""
        self.owner.act("write")
        self._disk.write(self._path, text)

    def unlink(self, missing_ok: bool = False) -> None:
        self.owner.act("write")
        self._disk.remove(self._path)


def write_private(path: Folder, text: str, *, is_durable: bool = False) -> None:
    path.write(text)


def offering(path: Path, card: ModelCard) -> Folder:
    """The run directory of a driver that no longer acts: reading it is not an act."""
    folder = Folder(Disk(), str(path), Unhindered())
    if card.adapters:
        (folder / OFFERED_FILE).write(json.dumps(asdict(Offer(tuple(card.adapters)))))
    return folder
