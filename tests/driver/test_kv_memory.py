"""The driver's hold on the memory for KV pages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from triptych.driver.kv_memory import KvMemory
from triptych.protocol.run_dir import kv_path


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_link_leads_to_the_memory_until_it_is_closed(tmp_path: Path) -> None:
    memory = KvMemory(tmp_path)
    kv_path(tmp_path).write_bytes(b"pages")
    assert kv_path(tmp_path).read_bytes() == b"pages"
    memory.close()
    assert not kv_path(tmp_path).is_symlink()


def test_closed_memory_is_given_back_even_if_a_fork_has_it_open(tmp_path: Path) -> None:
    memory = KvMemory(tmp_path)
    with kv_path(tmp_path).open("r+b") as fork:
        fork.write(bytes(1 << 20))
        fork.flush()
        memory.close()
        assert not os.fstat(fork.fileno()).st_blocks


def test_link_of_a_killed_driver_is_replaced(tmp_path: Path) -> None:
    kv_path(tmp_path).symlink_to("/proc/1/fd/1000000")
    memory = KvMemory(tmp_path)
    kv_path(tmp_path).write_bytes(b"pages")
    memory.close()


def test_discarded_memory_is_given_back(tmp_path: Path) -> None:
    memory = KvMemory(tmp_path)
    kv_path(tmp_path).write_bytes(bytes(1 << 20))
    assert kv_path(tmp_path).stat().st_blocks
    memory.discard()
    assert not kv_path(tmp_path).stat().st_blocks
    memory.close()


def test_folder_that_cannot_be_written_leaves_no_file_open(tmp_path: Path) -> None:
    before = open_files()
    with pytest.raises(FileNotFoundError):
        KvMemory(tmp_path / "missing")
    assert open_files() == before
