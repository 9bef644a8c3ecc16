"""The file that packed weights are in: when a process finds them there, and that none can change them."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from triptych.protocol.arrays import Bytes
from triptych.workers.execute.kernels import memory
from triptych.workers.execute.kernels.memory import HUGE_PAGE
from triptych.workers.execute.weights_file import WeightsFile

NUM_BYTES = 3 * HUGE_PAGE - 100


@pytest.fixture
def path() -> Iterator[Path]:
    file = os.memfd_create("weights")
    yield Path(f"/proc/self/fd/{file}")
    os.close(file)


@pytest.fixture(autouse=True)
def _huge_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system has none."""
    if "without_huge_pages" not in request.fixturenames:
        make_huge = memory._make_huge
        monkeypatch.setattr(memory, "_make_huge", lambda *address: make_huge(*address) or True)


def open_weights(path: Path, *, model: str = "one", level: str = "avx512") -> tuple[Bytes, WeightsFile]:
    file = WeightsFile.open(path)
    assert file is not None
    file.claim(model)
    file.find(level)
    return file.arena(NUM_BYTES).take(NUM_BYTES), file


def leave_weights(path: Path) -> Bytes:
    """What a process does that packs them."""
    weights, file = open_weights(path)
    assert not file.is_complete
    assert not weights.any()
    weights[:] = 7
    file.complete()
    file.close()
    return weights


def size_in_memory(path: Path) -> int:
    return 512 * path.stat().st_blocks


def test_next_process_finds_them(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave_weights(path)
    with caplog.at_level("INFO", "triptych"):
        weights, file = open_weights(path)
    assert file.is_complete
    assert (weights == 7).all()
    assert "the packed weights of an earlier process are in memory" in caplog.text
    file.close()
    assert open_weights(path)[1].is_complete


def test_process_that_has_packed_them_goes_on_with_them(path: Path) -> None:
    assert (leave_weights(path) == 7).all()


@pytest.mark.parametrize("options", [{"model": "two"}, {"level": "amx"}], ids=lambda options: next(iter(options)))
def test_others_begin_with_zeros(path: Path, options: dict[str, str]) -> None:
    leave_weights(path)
    weights, file = open_weights(path, **options)
    assert not file.is_complete
    assert not weights.any()


def test_memory_of_another_model_is_given_back_before_weights_are_loaded(path: Path) -> None:
    leave_weights(path)
    assert size_in_memory(path) > NUM_BYTES
    file = WeightsFile.open(path)
    assert file is not None
    file.claim("two")
    assert not size_in_memory(path)


def test_process_that_dies_while_it_packs_leaves_nothing(path: Path) -> None:
    weights, _ = open_weights(path)
    weights[:] = 7
    del weights
    weights, file = open_weights(path)
    assert not file.is_complete
    assert not weights.any()


def test_what_another_program_has_written_does_not_count(path: Path) -> None:
    path.write_bytes(b"triptych weights 1" + bytes(1 << 20))
    weights, file = open_weights(path)
    assert not file.is_complete
    assert not weights.any()


def test_memory_of_refused_weights_is_given_back(path: Path) -> None:
    """As of a model that fails its self-test, and goes on with transformers' modules."""
    weights, file = open_weights(path)
    weights[:] = 7
    file.close()
    assert not size_in_memory(path)


def test_file_that_is_never_used_stays_empty(path: Path) -> None:
    file = WeightsFile.open(path)
    assert file is not None
    file.close()
    assert not size_in_memory(path)


@pytest.mark.parametrize("is_found", [False, True], ids=["packed", "found"])
def test_no_store_changes_them(path: Path, is_found: bool) -> None:
    weights = leave_weights(path)
    if is_found:
        weights, _ = open_weights(path)
        with pytest.raises(ValueError, match="read-only"):
            weights[0] = 1
    libc, page = ctypes.CDLL(None), ctypes.c_void_p(weights.ctypes.data)
    assert libc.mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE) == -1
    child = os.fork()
    if not child:
        faulthandler.disable()
        ctypes.memset(page, 1, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert (open_weights(path)[0] == 7).all()


@pytest.fixture
def without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_make_huge", lambda *_: False)


@pytest.mark.usefixtures("without_huge_pages")
def test_where_files_have_no_huge_pages_they_are_in_ordinary_memory(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each token reads all of them: what a restart gains, every step would lose."""
    with caplog.at_level("INFO", "triptych"):
        weights, file = open_weights(path)
    weights[:] = 7
    file.complete()
    file.close()
    assert "packed weights will not outlive this process: " in caplog.text
    assert "memory of a file has no huge pages" in caplog.text
    assert not size_in_memory(path)
    assert (weights == 7).all()


def test_system_says_whether_it_has_huge_pages(path: Path) -> None:
    leave_weights(path)
    smaps = Path("/proc/self/smaps")
    weights, _ = open_weights(path)
    assert weights[:: mmap.PAGESIZE].all()
    mapping = smaps.read_text().partition(f"{weights.ctypes.data:x}-")[2]
    on_huge_pages = int(mapping.partition("\nShmemPmdMapped:")[2].split()[0]) * 1024
    has_any = memory._make_huge(memory.Arena(HUGE_PAGE, *_file_of(path)).take(1).ctypes.data)
    assert on_huge_pages == (3 * HUGE_PAGE if has_any else 0)


def _file_of(path: Path) -> tuple[int, int]:
    return int(path.name), HUGE_PAGE
