"""The bytes of the journal: a header page, fixed records, and an arena for prompts and tokens.

    | header, 4096 bytes | records, num_records x 512 bytes | arena, arena_bytes |

A record's extent in the arena is contiguous: the request (see ``record``), padded to four bytes, then three columns
of ``token_capacity`` entries: token ids (int32), times (uint32, units of 10 microseconds after acceptance), and, if
logprobs were requested, ``logprob_words`` four-byte words per token. Last come ``score_words`` four-byte words for the
logprobs of the prompt (see ``scores``) or its embedding; they are valid once ``tokens_word`` counts a token, or has
their check.

The four publishing words hold ``generation << 32 | value`` (``tokens_word``: ``count << 32 | check``) and are stored by
one aligned eight-byte write. ``check`` is a hash of the generation, of the prompt's results and of the counted tokens
with their logprobs, a request carries a CRC, and ``finish_word`` holds, besides the reason, a check of ``tokens_word``
and of the error: so a reader never trusts a partial write, in whatever order a weakly ordered machine shows it, or a
disk has written it. ``release_word`` holds a check of how the answer ended, for the driver that opens the file next.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..descriptors import beyond_standard_streams
from ..errors import ConfigError, JournalError
from ..lock import LockFile
from ..private_file import flush_names

MAGIC = b"TRIPTYCH"
LAYOUT_VERSION = 11
HEADER_BYTES = 4096
TIME_UNIT_NS = 10_000
BYTES_A_TOKEN = 8  # per output token: its id and its time; a prompt token takes half
MAX_ID_BYTES = 64
MAX_ERROR_BYTES = 104
MAX_CHUNK_ENDS = 6

# prepare_word
FREE, ACCEPTED, DISPATCHED = 0, 1, 2
# release_word, in its lowest bits
RELEASED, FORGOTTEN, UNREAD = 1, 2, 3  # UNREAD: forgotten without an acknowledgement from any client
ACKNOWLEDGED = 4  # released and read, but kept because other choices of its request are not
RELEASE_STATE = 7  # mask of these

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("record_bytes", "<u4"),
        ("num_records", "<u8"),
        ("arena_bytes", "<u8"),
        # written by the driver, see clock
        ("model_key", "<u8"),  # the model whose token ids these are; 0: none yet
        ("boot_id", "S40"),
        ("wall_offset_ns", "<i8"),  # CLOCK_REALTIME - CLOCK_MONOTONIC when the journal was last opened by a driver
        ("clock_shift_ns", "<i8"),  # the journal's clock - CLOCK_MONOTONIC
        # written by any process whose flush fails, cleared by the driver that opens the journal next, see flush
        ("has_failed", "<u8"),
    ]
)

RECORD = np.dtype(
    [
        # written by prepare, prepare_word last
        ("prepare_word", "<u8"),
        ("payload_offset", "<u8"),  # bytes from the start of the arena
        ("payload_bytes", "<u4"),
        ("crc", "<u4"),
        ("token_capacity", "<u4"),
        ("logprob_words", "<u4"),
        ("arrival", "<u8"),
        ("received_ns", "<u8"),
        ("tokenize_start_ns", "<u8"),
        ("tokenize_end_ns", "<u8"),
        ("accepted_ns", "<u8"),
        ("dispatched_ns", "<u8"),
        ("request_id", f"S{MAX_ID_BYTES}"),  # kept after the record is freed, to recognize a late resend
        ("digest", "<u4"),
        ("id_generation", "<u4"),  # of request_id and digest: valid only if prepare_word has the same generation
        ("last_slot", "<u4"),  # of the last published record of the same request, possibly this one
        ("last_generation", "<u4"),
        ("told_ns", "<u8"),  # when ACCEPTED was sent to its client again; 0: never
        ("score_words", "<u4"),
        ("owner", "<u8"),  # see owners; like the digest it is kept after the record is freed
        ("_prepare", "V12"),
        # written by execute, tokens_word after each token, finish_word last
        ("tokens_word", "<u8"),
        ("finish_word", "<u8"),
        ("scheduled_ns", "<u8"),  # when its first chunk was launched
        ("preempted_ns", "<u8"),  # total time lost to preemptions
        ("recovered_ns", "<u8"),
        ("num_cached_tokens", "<u4"),
        ("num_preemptions", "<u4"),
        ("error", f"S{MAX_ERROR_BYTES}"),
        ("score", "<f8"),  # of a hypothesis of a beam search
        ("survived_word", "<u8"),  # see deaths
        ("chunk_ends", "<u4", (MAX_CHUNK_ENDS,)),  # of the prompt, as many as fit, padded with 0
        # written by summarize, release_word last
        ("release_word", "<u8"),
        ("end_tokens", "<u4"),  # tokens of the answer, possibly cut by a stop string or an abort
        ("end_reason", "<u4"),  # index into FINISH_REASONS
        ("end_code", "S32"),  # of the error, if summarize ended the request with one
        ("summarize_survived_word", "<u8"),
        ("_summarize", "V8"),
        # written by the driver, see deaths
        ("deaths_word", "<u8"),  # deaths of execute while it was processing this request
        ("summarize_deaths_word", "<u8"),
        ("_driver", "V24"),
        # written by execute too: its own section is full
        ("preempted_since_ns", "<u8"),  # when the preemption in progress began; 0: there is none
        ("recovered_since_ns", "<u8"),  # likewise for what a crash interrupted
        ("lost_early_ns", "<u8"),  # the part of preempted_ns and recovered_ns before the first token
    ]
)
Words = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int64]
SomeOrAll = Slots | slice
ALL = slice(None)
_PIECE_BYTES = 1 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SHIFT, _VALUE, _RELEASE_STATE = np.uint64(32), np.uint64(0xFFFFFFFF), np.uint64(RELEASE_STATE)


class Extent(NamedTuple):
    """Where a record's parts lie in the arena: bytes for the request, four-byte words for the columns."""

    payload_offset: int  # bytes
    tokens_at: int  # words
    times_at: int
    logprobs_at: int
    scores_at: int
    end: int  # bytes, a multiple of 64


def extent(payload_offset: int, payload_bytes: int, capacity: int, logprob_words: int, score_words: int = 0) -> Extent:
    tokens_at = (payload_offset + payload_bytes + 3) // 4
    times_at = tokens_at + capacity
    logprobs_at = times_at + capacity
    scores_at = logprobs_at + capacity * logprob_words
    end = 4 * (scores_at + score_words)
    return Extent(payload_offset, tokens_at, times_at, logprobs_at, scores_at, -(-end // 64) * 64)


def has_failed_flush(path: Path) -> bool:
    """Whether the journal at ``path`` is no longer flushed, see ``Journal.flush``; without opening it as a Journal.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        header = np.frombuffer(file.read(HEADER.itemsize), HEADER, 1)
    return bool(header[0]["has_failed"])


def check_readable(path: Path, file: int) -> None:
    """
    Raises:
        JournalError: the disk fails: an access to the mapped file may end the process (SIGBUS).
    """
    try:
        for offset in range(0, os.fstat(file).st_size, _PIECE_BYTES):
            os.pread(file, _PIECE_BYTES, offset)
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from error


def bytes_of_answers(num_sequences: int, num_tokens: int) -> int:
    """Arena bytes for the answers of ``num_sequences`` of ``num_tokens`` each, without logprobs and requests."""
    return num_sequences * num_tokens * BYTES_A_TOKEN


class Journal:
    """The mapped file. Its arrays are shared memory: every process sees a store at once.

    ``close`` drops the arrays; while others still refer to them, the file stays mapped.
    """

    def __init__(self, path: Path, file: int) -> None:
        self.path = path
        try:
            if os.fstat(file).st_size < HEADER_BYTES:
                raise JournalError(f"{path} has {os.fstat(file).st_size} bytes, a journal has at least {HEADER_BYTES}")
            self._map = mmap.mmap(file, 0)
            header = _checked_header(self._map, path)
            self.header: np.void = np.frombuffer(self._map, HEADER, 1)[0]
        except BaseException:
            os.close(file)
            raise
        self._file = file
        self._close_file = weakref.finalize(self, os.close, file)  # if close is never called
        self._close_file.atexit = False  # a thread may be flushing
        self.num_records = int(header["num_records"])
        self.arena_bytes = int(header["arena_bytes"])
        self._clock_shift_ns = int(header["clock_shift_ns"])
        arena_at = HEADER_BYTES + self.num_records * RECORD.itemsize
        self.records = np.frombuffer(self._map, RECORD, self.num_records, HEADER_BYTES)
        self.arena = np.frombuffer(self._map, np.uint8, self.arena_bytes, arena_at)
        self.words = self.arena.view(np.uint32)
        # One strided view per field: looking a field up by name costs more than the store itself.
        self.prepare_words: Words = self.records["prepare_word"]
        self.tokens_words: Words = self.records["tokens_word"]
        self.finish_words: Words = self.records["finish_word"]
        self.release_words: Words = self.records["release_word"]

    @classmethod
    @beyond_standard_streams()
    def create(cls, path: Path, *, num_records: int, arena_bytes: int) -> Journal:
        """A new journal, on the disk, with all of its space allocated, so that a full disk fails here and not later.

        Raises:
            ConfigError: there is not enough space, or another driver is creating it.
            OSError: the file already exists, or cannot be created for another reason.
        """
        arena_bytes = -(-arena_bytes // 64) * 64
        size = HEADER_BYTES + num_records * RECORD.itemsize + arena_bytes
        unfinished = path.with_name(path.name + ".new")  # linked under its real name only once complete
        lock = LockFile(unfinished, os.O_CREAT | os.O_NOFOLLOW)
        try:
            if not lock.take():
                raise ConfigError(f"another driver is creating the journal {path}", param="journal")
            try:
                os.ftruncate(lock.fileno(), 0)  # left by a driver that was killed
                _allocate(lock.fileno(), size)
                mmap.mmap(lock.fileno(), size).close()  # not every file system shares memory
                header = np.zeros(1, HEADER)
                header[0] = (MAGIC, LAYOUT_VERSION, RECORD.itemsize, num_records, arena_bytes, 0, b"", 0, 0, 0)
                os.pwrite(lock.fileno(), header.tobytes(), 0)
                os.fsync(lock.fileno())  # after a power loss, a name without a header would be no journal
                os.link(unfinished, path)
            finally:
                unfinished.unlink(missing_ok=True)
            flush_names(path.parent)
            return cls(path, os.dup(lock.fileno()))
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            error.filename = str(path)  # it may lie on another disk than the run directory
            raise ConfigError(
                f"the journal {path} needs {size} bytes: {error.strerror}; use a smaller --arena-bytes, or a"
                " --run-dir (or --journal) with enough free space",
                param="arena_bytes",
            ) from error
        finally:
            lock.release()

    @classmethod
    @beyond_standard_streams()
    def open(cls, path: Path) -> Journal:
        """An existing journal.

        Raises:
            JournalError: the file is not a journal of this version, or was truncated.
        """
        return cls(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def allocate(self) -> None:
        """Allocate what a copy with holes only promises: on a full disk, a store into a hole ends its process (SIGBUS).

        Raises:
            ConfigError: there is not enough space.
        """
        try:
            _allocate(self._file, len(self._map))
        except OSError as error:
            text = f"the journal {self.path} has holes, {len(self._map)} bytes cannot be allocated: {error.strerror}"
            raise ConfigError(text, param="journal") from error

    @property
    def is_whole(self) -> bool:
        """Whether the file has all of its bytes: after it was truncated, an access ends the process (SIGBUS)."""
        return os.fstat(self._file).st_size >= len(self._map)

    def check_readable(self) -> None:
        """
        Raises:
            JournalError: the file was truncated, or its disk fails: an access may end the process (SIGBUS).
        """
        if not self.is_whole:
            raise JournalError(f"{self.path} was truncated to {os.fstat(self._file).st_size} bytes while it was in use")
        check_readable(self.path, self._file)

    def now_ns(self) -> int:
        """The current time of the journal's clock: CLOCK_MONOTONIC, continued across reboots."""
        return time.monotonic_ns() + self._clock_shift_ns

    def flush(self) -> None:
        """Wait until everything written so far is on the disk. Free if the file is in memory.

        Once a flush has failed, all fail, in every process and after restarts, until ``write_again``: Linux marks the
        pages it failed to write as clean, so the next fdatasync would succeed without them.

        Raises:
            JournalError: the disk failed, now or earlier.
        """
        if self.header["has_failed"]:
            raise JournalError(f"{self.path} could not be written earlier; the next driver writes all of it again")
        self._sync()

    def write_again(self) -> None:
        """Write every page to the disk if a flush has failed. Called by the driver while no worker runs.

        Raises:
            JournalError: the disk failed again.
        """
        if not self.header["has_failed"]:
            return
        first_bytes = np.frombuffer(self._map, np.uint8)[:: mmap.PAGESIZE]
        first_bytes[:] = first_bytes.copy()  # any store marks its page dirty
        self._sync()
        self.header["has_failed"] = 0  # last: if killed before this, the next driver does it again

    def _sync(self) -> None:
        try:
            os.fdatasync(self._file)  # like msync, but Python's mmap.flush holds the GIL
        except OSError as error:
            self.header["has_failed"] = 1
            raise JournalError(f"{self.path} cannot be written: {error.strerror}") from error

    def generation(self, slot: int) -> int:
        """The generation that prepare last published in ``slot``."""
        return int(self.prepare_words[slot]) >> 32

    def generations(self, slots: SomeOrAll = ALL) -> npt.NDArray[np.uint64]:
        """uint64 [slots], ``generation`` of each."""
        return self.prepare_words[slots] >> _SHIFT

    def state(self, slot: int) -> int:
        """FREE, ACCEPTED or DISPATCHED."""
        return int(self.prepare_words[slot]) & 0xFFFFFFFF

    def states(self, slots: SomeOrAll = ALL) -> npt.NDArray[np.uint64]:
        """uint64 [slots], ``state`` of each."""
        return self.prepare_words[slots] & _VALUE

    def release_states(self, slots: SomeOrAll = ALL) -> npt.NDArray[np.uint64]:
        """uint64 [slots]: 0, RELEASED, FORGOTTEN, UNREAD or ACKNOWLEDGED, for the current generation."""
        words = self.release_words[slots]
        states: npt.NDArray[np.uint64] = (words & _RELEASE_STATE) * (words >> _SHIFT == self.generations(slots))
        return states

    def slots_in_use(self) -> Slots:
        """In ascending order. Reads a cache line per record, and most are free: keep the result."""
        return np.flatnonzero(self.states())

    def close(self) -> None:
        for name in (
            "header",
            "records",
            "arena",
            "words",
            "prepare_words",
            "tokens_words",
            "finish_words",
            "release_words",
        ):
            self.__dict__.pop(name, None)
        self._close_file()
        try:
            self._map.close()
        except BufferError:
            return  # arrays of it are still in use; the mapping goes with the last one


def word(generation: int, value: int) -> int:
    return generation << 32 | value


def split_word(value: int) -> tuple[int, int]:
    """``(generation, value)``, or ``(count, check)`` of a tokens_word."""
    return int(value) >> 32, int(value) & 0xFFFFFFFF


def _allocate(file: int, size: int) -> None:
    """Like ``posix_fallocate``, which fills the disk before it says that a file is too large: others would run out."""
    disk, num_missing = os.fstatvfs(file), size - os.fstat(file).st_blocks * 512
    if disk.f_blocks and num_missing > disk.f_bfree * disk.f_frsize:  # without blocks, it has no limit
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(file, 0, size)


def _checked_header(mapped: mmap.mmap, path: Path) -> np.void:
    header: np.void = np.frombuffer(bytes(mapped[: HEADER.itemsize]), HEADER)[0]
    if header["magic"] != MAGIC:
        raise JournalError(f"{path} is not a journal")
    if header["version"] != LAYOUT_VERSION or header["record_bytes"] != RECORD.itemsize:
        raise JournalError(
            f"{path} has layout version {header['version']}, this program reads {LAYOUT_VERSION}: only the version of"
            " Triptych that wrote it can answer the requests in it; to start without them, remove the file"
        )
    size = HEADER_BYTES + int(header["num_records"]) * RECORD.itemsize + int(header["arena_bytes"])
    if len(mapped) != size:
        raise JournalError(f"{path} has {len(mapped)} bytes, its header says {size}")
    return header
