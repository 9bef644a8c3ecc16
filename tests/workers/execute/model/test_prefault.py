"""The KV pool is brought into memory while execute is idle, so that no prompt waits for the system to provide it."""

from __future__ import annotations

import json
import mmap
import os
import platform
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.waiting import eventually
from triptych import Driver
from triptych.protocol.config import DEMO_CHECKPOINT
from triptych.workers.execute.kernels.memory import HUGE_PAGE, Arena, populate
from triptych.workers.execute.model import prefault
from triptych.workers.execute.model.prefault import Prefault

NUM_BYTES = 8 * HUGE_PAGE
PLENTY = 1 << 40

needs_populate = pytest.mark.skipif(
    not populate(torch.zeros(1).data_ptr(), 4), reason="the kernel has no MADV_POPULATE_WRITE"
)

needs_collapse = pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (6, 1)
    or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="the kernel has no MADV_COLLAPSE",
)


def make_pool(num_bytes: int = NUM_BYTES) -> torch.Tensor:
    return torch.from_numpy(Arena(num_bytes).take(num_bytes))


@pytest.fixture
def file() -> Iterator[int]:
    file = os.memfd_create("kv")
    os.ftruncate(file, 2 * NUM_BYTES)
    yield file
    os.close(file)


def make_shared_pool(file: int) -> torch.Tensor:
    return torch.from_numpy(Arena(NUM_BYTES, file, HUGE_PAGE).take(NUM_BYTES))


def bytes_on_huge_pages(pool: torch.Tensor) -> int:
    """Of the mapping of a file that begins with this pool."""
    smaps = Path("/proc/self/smaps").read_text()
    mapping = smaps.partition(f"{pool.data_ptr():x}-")[2]
    return int(mapping.partition("\nShmemPmdMapped:")[2].split()[0]) * 1024


def num_faults_of_writing(pool: torch.Tensor) -> int:
    torch.empty(2 * mmap.PAGESIZE)[:: mmap.PAGESIZE].fill_(1)  # the first call faults in torch's own code
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    pool[:: mmap.PAGESIZE].fill_(1)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def finish(work: Prefault, seconds: float = 0.0) -> int:
    """Returns how many calls it took."""
    count = 1
    while work.advance(seconds):
        count += 1
    return count


def test_untouched_memory_faults() -> None:
    assert num_faults_of_writing(make_pool()) >= NUM_BYTES // HUGE_PAGE, "the next test would prove nothing"


@needs_populate
def test_prefaulted_memory_does_not() -> None:
    pools = [make_pool(), make_pool(NUM_BYTES // 2 + 64)]
    assert finish(Prefault(pools, available=lambda: PLENTY)) > 8, "each call does a little"
    assert sum(map(num_faults_of_writing, pools)) <= 2


@needs_populate
def test_contents_stay() -> None:
    pool = make_pool()
    pool[:: mmap.PAGESIZE * 100] = 7
    expected = pool.clone()
    finish(Prefault([pool], available=lambda: PLENTY))
    assert torch.equal(pool, expected)


@needs_populate
def test_beginnings_of_all_layers_come_first() -> None:
    pools = [make_pool(), make_pool()]
    work = Prefault(pools, available=lambda: PLENTY)
    for _ in pools:
        assert work.advance(0.0)
    assert sum(num_faults_of_writing(pool[:HUGE_PAGE]) for pool in pools) == 0
    assert sum(num_faults_of_writing(pool[-HUGE_PAGE:]) for pool in pools) > 0


def test_half_of_the_free_memory_is_left_to_others() -> None:
    pool, free = make_pool(), [1000, 501, 499]
    work = Prefault([pool], available=lambda: free.pop(0))
    assert work.advance(0.0)
    assert not work.advance(1.0)
    assert not free
    assert num_faults_of_writing(pool) > 0


def test_an_old_kernel_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(prefault, "populate", lambda address, num_bytes: asked.append(address))
    assert not Prefault([make_pool()], available=lambda: PLENTY).advance(1.0)
    assert len(asked) == 1


def test_nothing_to_do_without_pages_on_the_host() -> None:
    assert not Prefault([torch.empty(4, device="meta")]).advance(1.0)


@needs_collapse
def test_memory_of_a_file_gets_huge_pages(file: int) -> None:
    pool = make_shared_pool(file)
    pool[::7] = 7
    assert bytes_on_huge_pages(pool) == 0, "the next lines would prove nothing"
    expected = pool.clone()
    # As where a layer's pool ends and the next one begins: in the middle of a huge page.
    finish(Prefault([pool[: NUM_BYTES // 3], pool[NUM_BYTES // 3 :]], available=lambda: PLENTY))
    assert bytes_on_huge_pages(pool) == NUM_BYTES
    assert torch.equal(pool, expected)


@needs_collapse
def test_huge_page_does_not_begin_as_512_small_ones(file: int) -> None:
    """To replace these takes ten times as long."""
    pool = make_shared_pool(file)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    finish(Prefault([pool], available=lambda: PLENTY))
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < NUM_BYTES // mmap.PAGESIZE // 10
    assert bytes_on_huge_pages(pool) == NUM_BYTES


@needs_collapse
def test_next_process_finds_them(file: int) -> None:
    finish(Prefault([make_shared_pool(file)], available=lambda: PLENTY))
    pool = make_shared_pool(file)
    assert num_faults_of_writing(pool) <= NUM_BYTES // HUGE_PAGE
    assert bytes_on_huge_pages(pool) == NUM_BYTES


@needs_populate
def test_an_idle_pipeline_has_its_pool_in_memory() -> None:
    pool_bytes = 64 << 20
    config = json.loads((DEMO_CHECKPOINT / "config.json").read_text())
    numbers_per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    num_pages = pool_bytes // (2 * numbers_per_token * 16)
    with Driver("demo", device="cpu", threads=1, num_pages=num_pages, page_size=16) as driver:
        eventually(lambda: most_resident(driver.pids["execute"]) >= pool_bytes)


def most_resident(pid: int | None) -> int:
    """Bytes in memory of the mapping that has most, of those without a file on a disk."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.MULTILINE)
    heads = [mapping.partition("\n")[0] for mapping in mappings]
    anonymous = [m for head, m in zip(heads, mappings, strict=True) if len(head.split()) == 5 or "memfd:" in head]
    return max(int(mapping.partition("\nRss:")[2].split()[0]) for mapping in anonymous) * 1024
