"""The driver's hold on memory of execute."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from triptych.driver.deaths import Death
from triptych.driver.lasting_memory import ExecuteMemory, LastingMemory
from triptych.protocol.run_dir import kv_path, weights_path


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_link_leads_to_the_memory_until_it_is_closed(tmp_path: Path) -> None:
    memory = LastingMemory(kv_path(tmp_path))
    kv_path(tmp_path).write_bytes(b"pages")
    assert kv_path(tmp_path).read_bytes() == b"pages"
    memory.close()
    assert not kv_path(tmp_path).is_symlink()


def test_closed_memory_is_given_back_even_if_a_fork_has_it_open(tmp_path: Path) -> None:
    memory = LastingMemory(kv_path(tmp_path))
    with kv_path(tmp_path).open("r+b") as fork:
        fork.write(bytes(1 << 20))
        fork.flush()
        memory.close()
        assert not os.fstat(fork.fileno()).st_blocks


def test_link_of_a_killed_driver_is_replaced(tmp_path: Path) -> None:
    kv_path(tmp_path).symlink_to("/proc/1/fd/1000000")
    memory = LastingMemory(kv_path(tmp_path))
    kv_path(tmp_path).write_bytes(b"pages")
    memory.close()


def test_discarded_memory_is_given_back(tmp_path: Path) -> None:
    memory = LastingMemory(kv_path(tmp_path))
    kv_path(tmp_path).write_bytes(bytes(1 << 20))
    assert kv_path(tmp_path).stat().st_blocks
    memory.discard()
    assert not kv_path(tmp_path).stat().st_blocks
    memory.close()


def test_folder_that_cannot_be_written_leaves_no_file_open(tmp_path: Path) -> None:
    before = open_files()
    with pytest.raises(FileNotFoundError):
        LastingMemory(kv_path(tmp_path / "missing"))
    assert open_files() == before


@pytest.mark.parametrize(
    ("role", "is_internal", "is_degraded", "left"),
    [
        ("execute", False, False, "kv weights"),
        ("execute", True, False, "weights"),
        ("execute", True, True, ""),
        ("prepare", True, True, "kv weights"),
    ],
    ids=["killed", "crashed", "crashed when degraded", "another worker"],
)
def test_next_process_gets_what_can_be_trusted(
    role: str, is_internal: bool, is_degraded: bool, left: str, tmp_path: Path
) -> None:
    """A process that crashes may have written anywhere, except to weights that are complete."""
    memory, links = ExecuteMemory(tmp_path), (kv_path(tmp_path), weights_path(tmp_path))
    for link in links:
        link.write_bytes(b"something")
    memory.note_death(Death(role, -11, is_internal, False), is_degraded=is_degraded)
    assert " ".join(link.name for link in links if link.read_bytes()) == left
    memory.close()
    assert not any(link.is_symlink() for link in links)


def test_worker_that_was_given_up_leaves_nothing(tmp_path: Path) -> None:
    memory, links = ExecuteMemory(tmp_path), (kv_path(tmp_path), weights_path(tmp_path))
    for role, is_empty in (("summarize", False), ("execute", True)):
        for link in links:
            link.write_bytes(b"something")
        memory.note_vacancy(role)
        assert [not link.read_bytes() for link in links] == [is_empty] * 2
    memory.close()


def test_execute_memory_that_cannot_be_linked_leaves_no_file_open(tmp_path: Path) -> None:
    weights_path(tmp_path).mkdir()
    before = open_files()
    with pytest.raises(OSError, match="weights"):
        ExecuteMemory(tmp_path)
    assert open_files() == before
    assert not kv_path(tmp_path).is_symlink()
