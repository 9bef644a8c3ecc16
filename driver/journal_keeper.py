"""The driver's hold on the journal file: one driver at a time, verified before any worker trusts it."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..protocol.config import PipelineConfig
from ..protocol.errors import ConfigError, JournalError
from ..protocol.journal.clock import wind_clock
from ..protocol.journal.layout import FORGOTTEN, UNREAD, Journal, Slots, bytes_of_answers, check_readable
from ..protocol.journal.requests import read_request
from ..protocol.journal.salvage import salvage
from ..protocol.lock import LockFile
from ..protocol.lora import PARAM as LORA_PARAM
from ..protocol.model_card import ModelCard
from ..protocol.run_dir import journal_path
from ..protocol.threads import start_thread
from .deaths import Death
from .flag import Flag

logger = logging.getLogger(__name__)


class JournalKeeper:
    """Creates the journal or takes over an existing one. The lock is released when its process ends."""

    def __init__(self, run_dir: Path, config: PipelineConfig) -> None:
        """
        Raises:
            ConfigError: another driver uses the file, it belongs to another user, or there is no disk space for it, or
                for the holes in a copy.
            JournalError: it is not a journal of this version, was truncated, or cannot be read or written.
        """
        service = config.service
        self.path = journal_path(run_dir, service)
        is_new = _create(self.path, num_records=service.max_records, arena_bytes=service.arena_bytes)
        self._lock = _lock(self.path)
        self._stopping = Flag()
        self._thread: threading.Thread | None = None
        try:
            self.journal = self._open(is_new=is_new)
        except BaseException:
            self._lock.release()
            raise
        if (interval_s := service.flush_interval_s) is not None:
            thread = threading.Thread(
                target=self._flush_for_ever, args=[interval_s], name="triptych-journal", daemon=True
            )
            try:
                start_thread(thread)
            except BaseException:  # no thread available, or a signal while it was starting: then it ends by itself
                self.close()
                raise
            self._thread = thread

    def _open(self, *, is_new: bool) -> Journal:
        if not is_new:
            check_readable(self.path, self._lock.fileno())
        journal = Journal.open(self.path)
        if not is_new:
            journal.allocate()
        for line in salvage(journal):
            logger.warning("%s: %s", self.path, line)
        if moved_ns := wind_clock(journal):
            logger.warning(
                "%s is from before the last boot: its clock continues, %.0f s later by the wall clock; prompts are"
                " computed again",
                self.path,
                moved_ns / 1e9,
            )
        if count := num_unanswered(journal):
            logger.info("%s: unanswered requests of an earlier driver: %d", self.path, count)
        journal.write_again()
        journal.close()
        return Journal.open(self.path)

    @property
    def has_failed(self) -> bool:
        """Whether a flush has failed: nothing is flushed any more, see ``Journal.flush``."""
        return not self.journal.is_whole or bool(self.journal.header["has_failed"])

    @property
    def num_unanswered(self) -> int:
        """Accepted requests without a complete answer; 0 if they are lost, as the file was truncated."""
        return num_unanswered(self.journal) if self.journal.is_whole else 0

    @property
    def has_unread_ends(self) -> bool:
        """Whether a client has not acknowledged the end of its request, or will have one to acknowledge."""
        if not self.journal.is_whole:
            return False
        states = self.journal.release_states(self.journal.slots_in_use())
        return bool(np.any((states != FORGOTTEN) & (states != UNREAD)))

    def check_after(self, death: Death) -> None:
        """Find out whether a worker died because of the file, as the next ones would, whatever they do.

        Raises:
            JournalError: it was truncated, or its disk fails.
        """
        if death.code == -signal.SIGBUS or not self.journal.is_whole:
            self.journal.check_readable()

    def claim_for(self, model: str, adapters: Mapping[str, str]) -> None:
        """Record the model whose token ids the journal holds. ``adapters``: name -> digest.

        Raises:
            ConfigError: there are unanswered requests of another model or for another adapter.
        """
        known = int(self.journal.header["model_key"])
        if known not in (0, _key(model)) and (count := self.num_unanswered):
            raise ConfigError(f"{self.path} holds {count} unanswered requests of another model", param="model")
        for name, digest in self.unanswered_adapters():
            if adapters.get(name) != digest:
                what = "has changed" if name in adapters else "is not configured"
                raise ConfigError(
                    f"{self.path} holds unanswered requests for the adapter {name!r}, which {what}", param=LORA_PARAM
                )
        self.name_model(model)

    def unanswered_adapters(self) -> Iterator[tuple[str, str]]:
        """Name and digest of the adapter of each unanswered request that uses one."""
        for slot in _unanswered(self.journal).tolist():
            if (view := read_request(self.journal, slot)) is not None and view.record.lora:
                yield view.record.lora, view.record.lora_digest

    def name_model(self, model: str) -> None:
        self.journal.header["model_key"] = _key(model)

    def _flush_for_ever(self, interval_s: float) -> None:
        while not self._stopping.wait(interval_s):
            try:
                if self.journal.is_whole:
                    self.journal.flush()
            except JournalError as error:
                logger.error("the journal is no longer flushed: %s", error.message)
                return

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self.journal.close()
        self._lock.release()


def warn_of_small_arena(config: PipelineConfig, card: ModelCard) -> None:
    """Warn if the journal is too small for all sequences that may be live: requests would be refused although execute
    has room for them.
    """
    needed, arena_bytes = bytes_of_answers(card.max_live, card.max_model_len), config.service.arena_bytes
    if arena_bytes < needed:
        logger.warning(
            "--arena-bytes is %d: %d sequences of %d tokens, which may be live at once, need %d bytes of the journal",
            arena_bytes, card.max_live, card.max_model_len, needed,
        )  # fmt: skip


def _key(model: str) -> int:
    return zlib.crc32(model.encode()) or 1  # 0 means none


def num_unanswered(journal: Journal) -> int:
    """Accepted requests without a complete answer."""
    return len(_unanswered(journal))


def _unanswered(journal: Journal) -> Slots:
    slots = journal.slots_in_use()
    is_open: npt.NDArray[np.bool_] = journal.release_states(slots) == 0
    return slots[is_open]


def _create(path: Path, *, num_records: int, arena_bytes: int) -> bool:
    """Whether it did not exist yet."""
    try:
        if path.exists():
            return False
        Journal.create(path, num_records=num_records, arena_bytes=arena_bytes).close()
    except FileExistsError:  # another driver was faster; the lock decides
        return False
    except OSError as error:
        # As FUSE says of a file that it passes on unread.
        why = "its file system shares no memory" if error.errno == errno.ENODEV else error.strerror
        raise ConfigError(f"the journal {path} cannot be created: {why}", param="journal") from error
    return True


def _lock(path: Path) -> LockFile:
    try:
        lock = LockFile(path, os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"the journal {path} cannot be opened: {error.strerror}", param="journal") from error
    try:
        if (owner := os.fstat(lock.fileno()).st_uid) != os.getuid():
            raise ConfigError(f"the journal {path} belongs to user {owner}, not to {os.getuid()}", param="journal")
        if not lock.take():
            raise ConfigError(f"another driver uses the journal {path}", param="journal")
    except BaseException:
        lock.release()
        raise
    return lock
