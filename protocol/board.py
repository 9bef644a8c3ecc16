"""The board: one memory-mapped page for the driver, one per worker, and each worker's intent.

The driver writes the mode and the epochs; each worker writes its phase, a progress time and its statistics. There are
no locks: a reader that catches half-written statistics sees a wrong checksum and retries.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from .codec import pack, unpack
from .descriptors import beyond_standard_streams
from .errors import ConfigError
from .intent import INTENT_BYTES, Intent
from .view import HEAD_BYTES, View

ROLES = ("prepare", "execute", "summarize")
STARTING = ("down", "starting", "loading", "warming")
PHASES = (*STARTING, "ready", "stopped", "failed")
# Modes. In FAILED nothing is admitted, waiting requests end with an error, and status queries are still answered; in
# KEEP the workers exit at once and the journal keeps unfinished requests for the next driver.
RUN, DRAIN, STOP, FAILED, KEEP = 0, 1, 2, 3, 4

PAGE = 1 << 16
_STATS_BYTES = 2 * PAGE  # of a published page: one half can be read while the other is being written
_INTENTS_AT = PAGE + _STATS_BYTES * len(ROLES)
_VIEW_AT = _INTENTS_AT + INTENT_BYTES * len(ROLES)
_SIZE = _VIEW_AT + HEAD_BYTES + _STATS_BYTES
SUSPECT_SLOTS = 1024
_DRIVER = np.dtype(
    [
        ("mode", "<u8"),
        ("epochs", "<u8", (len(ROLES),)),
        ("is_degraded", "<u8"),  # execute runs one sequence at a time and without graphs
        ("num_suspects", "<u8"),  # ever written; the oldest are overwritten
        ("suspects", "<u8", (SUSPECT_SLOTS, 2)),  # (digest, deaths) of requests that killed a worker
        ("suspects_version", "<u8"),  # incremented with every change
        # Written by prepare: digest << 32 | deaths, once it has prepared such a request alone and survived
        ("survived", "<u8", (SUSPECT_SLOTS,)),
        ("is_crowded", "<u8", (len(ROLES),)),  # the worker ends again and again because of too many clients
    ]
)
_WORKER = np.dtype(
    [
        ("phase_word", "<u8"),  # epoch << 32 | phase
        ("progress_ns", "<u8"),  # CLOCK_MONOTONIC of the last sign of progress
        ("patience_ns", "<u8"),  # how long the worker expects its next sign of progress to take at most
        ("done", "<u8"),  # of ``total``, in the current phase
        ("total", "<u8"),
        ("stats_word", "<u8"),  # half << 63 | length << 32 | checksum
    ]
)


class Board:
    """The mapped file of one run directory."""

    @beyond_standard_streams()
    def __init__(self, path: Path) -> None:
        """
        Raises:
            ConfigError: there is not enough space for it.
        """
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._path, self._file = path, _identity(os.fstat(file))
            # Allocated up front: a full disk must fail here, not as SIGBUS at a later store into the mapping.
            os.posix_fallocate(file, 0, _SIZE)
            self._map = mmap.mmap(file, 0)
        except OSError as error:
            raise ConfigError(
                f"the board {path} needs {_SIZE} bytes: {error.strerror}; use a --run-dir with enough free space",
                param="run_dir",
            ) from error
        finally:
            os.close(file)
        pages = np.frombuffer(self._map, _DRIVER, 1)
        self._driver, self._mode = pages[0], pages["mode"]
        self._workers = {role: WorkerPage(self._map, PAGE + _STATS_BYTES * i) for i, role in enumerate(ROLES)}
        self.view = View(self._map, _VIEW_AT, WorkerPage(self._map, _VIEW_AT + HEAD_BYTES))
        self._intents = {role: Intent(self._map, _INTENTS_AT + i * INTENT_BYTES) for i, role in enumerate(ROLES)}

    @property
    def is_in_place(self) -> bool:
        """Whether the file is still where it was opened: otherwise the run directory was deleted, and what lies there
        now belongs to another pipeline.
        """
        try:
            return _identity(self._path.stat()) == self._file
        except OSError:
            return False

    @property
    def mode(self) -> int:
        return int(self._mode.item())  # of the field itself: a quarter of the time, which execute takes at each step

    def set_mode(self, mode: int) -> None:
        self._driver["mode"] = mode

    def begin_drain(self) -> None:
        """Take no new requests. No effect on a pipeline that is already stopping or has failed."""
        if self.mode == RUN:
            self.set_mode(DRAIN)

    def epoch(self, role: str) -> int:
        return int(self._driver["epochs"][ROLES.index(role)])

    def next_epoch(self, role: str) -> int:
        """Start a new incarnation of this worker. Epochs count from 1 and are never reused."""
        epoch = self.epoch(role) + 1
        self._driver["epochs"][ROLES.index(role)] = epoch
        return epoch

    @property
    def is_degraded(self) -> bool:
        return bool(self._driver["is_degraded"])

    def set_degraded(self, is_degraded: bool) -> None:
        self._driver["is_degraded"] = is_degraded

    @property
    def crowded(self) -> list[str]:
        """The roles whose processes end because they may open no file for another client."""
        return [role for role, is_so in zip(ROLES, self._driver["is_crowded"], strict=True) if is_so]

    def set_crowded(self, roles: Collection[str]) -> None:
        self._driver["is_crowded"] = [role in roles for role in ROLES]

    @property
    def suspects_version(self) -> int:
        """Changes whenever the set of suspects changes."""
        return int(self._driver["suspects_version"])

    def suspects(self) -> dict[int, int]:
        """Deaths of prepare held against each request, by its digest (or a count that is a verdict)."""
        count = min(int(self._driver["num_suspects"]), SUSPECT_SLOTS)
        rows, survived = self._driver["suspects"][:count].tolist(), self._driver["survived"][:count].tolist()
        return {
            digest: deaths
            for (digest, deaths), word in zip(rows, survived, strict=True)
            if deaths and (word >> 32 != digest or deaths > word & 0xFFFFFFFF)
        }

    def deaths_of(self, digest: int) -> int:
        """Every death ever counted, including those no longer held against the request."""
        index = self._index_of_suspect(digest)
        return 0 if index is None else int(self._driver["suspects"][index, 1])

    def set_suspect(self, digest: int, deaths: int) -> None:
        """Called by the driver."""
        count, index = int(self._driver["num_suspects"]), self._index_of_suspect(digest)
        if index is None:
            index, count = count % SUSPECT_SLOTS, count + 1
        self._driver["suspects"][index] = digest, deaths
        self._driver["num_suspects"] = count
        self._driver["suspects_version"] += 1

    def pardon(self, deaths: int) -> None:
        """Hold nothing against suspects with this count, which stands for a verdict. Called by the driver."""
        counts = self._driver["suspects"][:, 1]
        counts[counts == deaths] = 0
        self._driver["suspects_version"] += 1

    def note_survival(self, digest: int, deaths: int) -> None:
        """Record that such a request, after this many deaths, was prepared alone without harm. Called by prepare."""
        if (index := self._index_of_suspect(digest)) is not None:
            self._driver["survived"][index] = digest << 32 | deaths

    def _index_of_suspect(self, digest: int) -> int | None:
        known = np.flatnonzero(self._driver["suspects"][: int(self._driver["num_suspects"]), 0] == digest)
        return int(known[0]) if len(known) else None

    def intent(self, role: str) -> Intent:
        return self._intents[role]

    def worker(self, role: str) -> WorkerPage:
        return self._workers[role]

    def phase(self, role: str) -> str:
        """The phase of the worker's current incarnation."""
        return self.worker(role).phase(self.epoch(role))

    def ready(self, role: str) -> bool:
        return self.phase(role) == "ready"

    def stats(self) -> dict[str, Any]:
        """The latest published statistics of each worker, by role, with its phase and epoch."""
        result: dict[str, Any] = {}
        for role, page in self._workers.items():
            epoch = self.epoch(role)
            result[role] = {"phase": page.phase(epoch), "epoch": epoch, **page.stats()}
        return result

    def close(self) -> None:
        del self._driver, self._mode
        for page in self._workers.values():
            page.close()
        for intent in self._intents.values():
            intent.close()
        self.view.close()
        with contextlib.suppress(BufferError):  # a reader still holds a view; the mapping goes with the last one
            self._map.close()


def _identity(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


class WorkerPage:
    """One worker's part of the board. Written by that worker only."""

    def __init__(self, mapped: mmap.mmap, offset: int) -> None:
        self._head = np.frombuffer(mapped, _WORKER, 1, offset)[0]
        # [1], the field ``progress_ns``, for code that writes it without this class
        self.progress_word = np.frombuffer(mapped, _WORKER, 1, offset)["progress_ns"].view(np.int64)
        limit = PAGE - _WORKER.itemsize
        self._halves = [np.frombuffer(mapped, np.uint8, limit, offset + at) for at in (_WORKER.itemsize, PAGE)]
        self.phase_s: dict[str, float] = {}  # seconds spent in each finished phase, in the process that set it
        self._phase, self._since = PHASES[0], 0.0

    def set_phase(self, epoch: int, phase: str, *, since: float | None = None) -> None:
        """Enter a phase, now or at ``since``, an earlier time.monotonic()."""
        now = time.monotonic() if since is None else since
        if self._phase != PHASES[0]:
            self.phase_s[self._phase] = round(now - self._since, 3)
        self._phase, self._since = phase, now
        self.progress(0, 0)
        self._head["phase_word"] = epoch << 32 | PHASES.index(phase)

    def phase(self, epoch: int) -> str:
        """The phase of this epoch; "down" if the page still shows an earlier one."""
        word = int(self._head["phase_word"])
        return PHASES[word & 0xFFFFFFFF] if word >> 32 == epoch else "down"

    def progress(self, done: int | None = None, total: int | None = None) -> None:
        """Show that the worker is alive, and how far it has come in this phase."""
        if done is not None:
            self._head["done"], self._head["total"] = done, total or 0
        self._head["progress_ns"] = time.monotonic_ns()

    def set_patience(self, patience_ns: int) -> None:
        self._head["patience_ns"] = patience_ns

    @property
    def done_of_total(self) -> tuple[int, int]:
        return int(self._head["done"]), int(self._head["total"])

    @property
    def progress_ns(self) -> int:
        return int(self._head["progress_ns"])

    @property
    def patience_ns(self) -> int:
        return int(self._head["patience_ns"])

    def publish(self, stats: dict[str, Any]) -> None:
        """Readers see the old statistics until these are complete: a writer may be descheduled half-way."""
        data, half = pack(stats), 1 - (int(self._head["stats_word"]) >> 63)
        limit = len(self._halves[half])
        assert len(data) <= limit, f"statistics of {len(data)} bytes, the limit is {limit}"
        self._halves[half][: len(data)] = np.frombuffer(data, np.uint8)
        self._head["stats_word"] = half << 63 | len(data) << 32 | zlib.crc32(data)

    def stats(self) -> dict[str, Any]:
        """The latest published statistics; empty if there are none."""
        for _ in range(100):
            word = int(self._head["stats_word"])
            if word == 0:
                return {}
            data = self._halves[word >> 63][: word >> 32 & 0x7FFFFFFF].tobytes()
            if zlib.crc32(data) == word & 0xFFFFFFFF:
                return dict(unpack(data))
        return {}

    def close(self) -> None:
        del self._head, self._halves, self.progress_word
