"""The journal file is created completely or not at all, and only opened if it is a journal of this layout."""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.protocol.factories import accept, fail_to_sync, make_journal, make_record
from triptych.protocol.errors import ConfigError, JournalError
from triptych.protocol.journal.layout import (
    HEADER_BYTES,
    LAYOUT_VERSION,
    RECORD,
    Journal,
    bytes_of_answers,
    extent,
    split_word,
    word,
)
from triptych.protocol.journal.requests import RequestWriter, read_request


def test_record_has_no_unused_byte() -> None:
    assert RECORD.itemsize == 512


@pytest.mark.parametrize("name", ["prepare_word", "tokens_word", "finish_word", "release_word", "deaths_word"])
def test_publishing_word_is_one_aligned_store(name: str) -> None:
    kind, offset = RECORD.fields[name][:2]  # type: ignore[index]
    assert (kind.itemsize, offset % 8) == (8, 0)


@pytest.mark.parametrize("name", ["tokens_word", "release_word", "deaths_word"])
def test_no_two_writers_share_a_cache_line(name: str) -> None:
    assert RECORD.fields[name][1] % 64 == 0  # type: ignore[index]


def test_journal_can_be_opened_by_another_process(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    accept(RequestWriter(journal), journal, make_record("mine"))
    view = read_request(Journal.open(tmp_path / "journal"), 0)
    assert view is not None
    assert view.record == make_record("mine")


def test_new_journal_is_empty(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, num_records=3)
    assert [read_request(journal, slot) for slot in range(3)] == [None, None, None]


def test_arena_is_rounded_up_to_a_whole_number_of_extents(tmp_path: Path) -> None:
    assert make_journal(tmp_path, arena_bytes=65).arena_bytes == 128


def test_bytes_of_answers_are_those_of_their_extents() -> None:
    assert bytes_of_answers(3, 72) == 3 * extent(0, 0, 72, 0).end


def test_closed_journal_keeps_no_file_open(tmp_path: Path) -> None:
    def num_open() -> int:
        return sum(file.resolve().is_relative_to(tmp_path.resolve()) for file in Path("/proc/self/fd").iterdir())

    journal = make_journal(tmp_path)
    assert num_open() == 2  # itself, and the one of its mapping
    journal.close()
    assert num_open() == 0


def test_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    make_journal(tmp_path)
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        make_journal(tmp_path)
    assert (tmp_path / "journal").read_bytes() == b"precious"


def test_full_disk_is_reported_at_creation_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"needs 22528 bytes: No space left on device"):
        make_journal(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_name_of_a_new_journal_is_on_the_disk_and_never_before_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power loss, an empty file of this name would be refused, and no driver could start."""
    synced: list[tuple[str, list[str]]] = []

    def sync(file: int) -> None:
        names = sorted(path.name for path in tmp_path.iterdir())
        synced.append((Path(f"/proc/self/fd/{file}").readlink().name, names))
        if len(synced) == 1:
            assert Journal(tmp_path, os.dup(file)).num_records == 3

    monkeypatch.setattr(os, "fsync", sync)
    make_journal(tmp_path, num_records=3)
    assert synced == [("journal.new", ["journal.new"]), (tmp_path.name, ["journal"])]


@pytest.mark.parametrize(("code", "is_error"), [(errno.EINVAL, False), (errno.EIO, True)], ids=["cannot", "fails"])
def test_file_system_need_not_be_able_to_flush_names(
    code: int, is_error: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(file: int) -> None:
        if Path(f"/proc/self/fd/{file}").is_dir():
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(OSError, match="Input/output") if is_error else nullcontext():
        make_journal(tmp_path)


def test_disk_is_not_filled_by_a_file_that_cannot_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else writes to it would fail meanwhile."""
    found: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: found.append(1))
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_blocks=9, f_bfree=5, f_frsize=4096))
    with pytest.raises(ConfigError, match=r"needs 22528 bytes: No space left on device"):
        make_journal(tmp_path)
    assert found == []


def test_only_one_of_two_drivers_creates_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, allocate = tmp_path / "journal", os.posix_fallocate

    def come_between(file: int, offset: int, size: int) -> None:
        allocate(file, offset, size)
        monkeypatch.setattr(os, "posix_fallocate", allocate)
        with pytest.raises(ConfigError, match="another driver is creating the journal"):
            Journal.create(path, num_records=2, arena_bytes=1 << 12)

    monkeypatch.setattr(os, "posix_fallocate", come_between)
    Journal.create(path, num_records=2, arena_bytes=1 << 12).close()
    Journal.open(path).close()
    assert list(tmp_path.iterdir()) == [path]


def test_unfinished_file_of_a_killed_driver_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "journal.new").write_bytes(b"x" * 100_000)
    journal = Journal.create(tmp_path / "journal", num_records=2, arena_bytes=1 << 12)
    assert not journal.records.tobytes().strip(b"\0")
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


def test_disk_space_is_allocated_at_creation(tmp_path: Path) -> None:
    make_journal(tmp_path)
    facts = (tmp_path / "journal").stat()
    assert facts.st_blocks * 512 >= facts.st_size


@pytest.mark.parametrize("content", [b"", b"TRIPTYCH", bytes(HEADER_BYTES - 1)], ids=["empty", "magic only", "short"])
def test_file_too_short_for_a_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal").write_bytes(content)
    with pytest.raises(JournalError, match=f"has {len(content)} bytes, a journal has at least {HEADER_BYTES}"):
        Journal.open(tmp_path / "journal")


@pytest.mark.parametrize("content", [bytes(HEADER_BYTES), b"SQLite format 3\0" + bytes(HEADER_BYTES)])
def test_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal").write_bytes(content)
    with pytest.raises(JournalError, match="is not a journal"):
        Journal.open(tmp_path / "journal")


@pytest.mark.parametrize(
    ("offset", "value"),
    [(8, LAYOUT_VERSION + 1), (8, LAYOUT_VERSION - 1), (12, 511)],
    ids=["newer", "older", "record size"],
)
def test_other_layout_version_is_refused(tmp_path: Path, offset: int, value: int) -> None:
    make_journal(tmp_path)
    patch(tmp_path / "journal", offset, value.to_bytes(4, "little"))
    with pytest.raises(JournalError, match=r"has layout version .*, remove the file$"):
        Journal.open(tmp_path / "journal")


@pytest.mark.parametrize("change", [-1, 1, -4096], ids=["cut", "longer", "a page less"])
def test_file_of_another_size_is_refused(tmp_path: Path, change: int) -> None:
    size = os.path.getsize(make_journal(tmp_path).path)
    os.truncate(tmp_path / "journal", size + change)
    with pytest.raises(JournalError, match=f"has {size + change} bytes, its header says {size}"):
        Journal.open(tmp_path / "journal")


def test_refused_file_is_closed(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(bytes(HEADER_BYTES))
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(JournalError):
        Journal.open(tmp_path / "journal")
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_existing_view_can_be_read_after_the_journal_was_closed(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    words = journal.prepare_words
    journal.close()
    assert words.tolist() == [0, 0, 0, 0]


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    journal.close()
    journal.close()


@pytest.mark.parametrize("generation", [0, 1, 2**32 - 1])
@pytest.mark.parametrize("value", [0, 1, 2**32 - 1])
def test_word_holds_two_numbers(generation: int, value: int) -> None:
    assert split_word(word(generation, value)) == (generation, value)


@pytest.mark.parametrize("payload_bytes", [0, 1, 3, 4, 61, 200])
@pytest.mark.parametrize("logprob_words", [0, 1, 41])
def test_parts_of_an_extent_are_contiguous(payload_bytes: int, logprob_words: int) -> None:
    part = extent(128, payload_bytes, 10, logprob_words)
    assert 128 + payload_bytes <= 4 * part.tokens_at < 128 + payload_bytes + 4
    assert (part.times_at - part.tokens_at, part.logprobs_at - part.times_at) == (10, 10)
    assert 0 <= part.end - 4 * (part.logprobs_at + 10 * logprob_words) < 64
    assert part.end % 64 == 0


def test_store_is_visible_to_all_processes_at_once(tmp_path: Path) -> None:
    writer, reader = make_journal(tmp_path), Journal.open(tmp_path / "journal")
    writer.prepare_words[:] = np.arange(4, dtype=np.uint64)
    assert reader.prepare_words.tolist() == [0, 1, 2, 3]


def test_interrupted_creation_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupt)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        make_journal(tmp_path)
    assert (len(os.listdir("/proc/self/fd")), list(tmp_path.iterdir())) == (num_open, [])


def test_other_threads_run_during_a_flush(tmp_path: Path) -> None:
    journal, times, done = make_journal(tmp_path, arena_bytes=32 << 20), [0.0], threading.Event()

    def look() -> None:
        while not done.wait(0.0005):
            times.append(time.monotonic())

    def is_seen() -> bool:
        journal.arena[:] = len(times) % 256
        began = time.monotonic()
        journal.flush()
        ended = time.monotonic()
        if ended - began < 0.002:
            pytest.skip("this disk takes no time")
        return sum(began < at < ended for at in times) > (ended - began) / 0.004

    thread = threading.Thread(target=look)
    thread.start()
    try:
        assert any(is_seen() for _ in range(4))
    finally:
        done.set()
        thread.join()


def patch(path: Path, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def test_after_a_failed_flush_all_flushes_fail_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux marks the pages clean, so the next fdatasync, even of another process, would report success."""
    journal = make_journal(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail_to_sync)
        with pytest.raises(JournalError, match="cannot be written: Input/output error"):
            journal.flush()
    for other in (journal, Journal.open(journal.path)):
        with pytest.raises(JournalError, match="could not be written earlier"):
            other.flush()


def test_driver_rewrites_every_page_after_a_failed_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = make_journal(tmp_path)
    journal.arena[:] = np.arange(journal.arena_bytes) % 251
    journal.header["has_failed"] = 1
    content, synced = journal.path.read_bytes(), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail_to_sync)
        with pytest.raises(JournalError, match="Input/output error"):
            journal.write_again()
    assert journal.header["has_failed"]  # the next driver has to rewrite them too
    monkeypatch.setattr(os, "fdatasync", lambda file: synced.append(int(journal.header["has_failed"])))
    journal.write_again()
    journal.flush()
    assert synced == [1, 0]  # also the next one after a driver that is killed before all is written
    assert journal.path.read_bytes()[HEADER_BYTES:] == content[HEADER_BYTES:]
