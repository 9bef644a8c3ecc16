"""The file that the KV pool is in: what a process finds there, and when it is empty."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.workers.execute.clients import Clients
from tests.workers.execute.factories import make_sequence
from triptych.protocol.arrays import Bytes
from triptych.workers.execute.kv_file import KvFile

POOL: dict[str, Any] = {"num_pages": 8, "page_size": 4, "key": "a model"}
NUM_BYTES = 1 << 20


@pytest.fixture
def path() -> Iterator[Path]:
    file = os.memfd_create("kv")
    yield Path(f"/proc/self/fd/{file}")
    os.close(file)


def open_pool(path: Path, *, num_bytes: int = NUM_BYTES, model: str = "", **options: Any) -> tuple[Bytes, KvFile]:
    file = KvFile.open(path)
    assert file is not None
    if model:
        file.claim(model)
    return file.arena(num_bytes, **(POOL | options)).take(num_bytes), file


def test_next_process_finds_the_same_bytes(path: Path) -> None:
    pool, file = open_pool(path, model="one")
    assert file.is_new
    assert not pool.any()
    pool[:] = 7
    del pool, file
    pool, file = open_pool(path, model="one")
    assert not file.is_new
    assert (pool == 7).all()


@pytest.mark.parametrize(
    "options",
    [{"num_pages": 9}, {"page_size": 8}, {"num_bytes": 2 << 20}, {"key": "other kernels"}, {"model": "two"}],
    ids=lambda options: next(iter(options)),
)
def test_pool_of_another_form_begins_with_zeros(path: Path, options: dict[str, Any]) -> None:
    pool, _ = open_pool(path, model="one")
    pool[:] = 7
    del pool
    pool, file = open_pool(path, **({"model": "one"} | options))
    assert file.is_new
    assert not pool.any()
    assert file.records is not None
    assert not list(file.records.read())


def test_memory_of_another_model_is_given_back_before_the_weights_are_loaded(path: Path) -> None:
    pool, _ = open_pool(path, model="one")
    pool[:] = 7
    del pool
    assert path.stat().st_blocks
    file = KvFile.open(path)
    assert file is not None
    file.claim("one")
    assert path.stat().st_blocks
    file.claim("two")
    assert not path.stat().st_blocks


def test_missing_file_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "triptych"):
        assert KvFile.open(tmp_path / "kv") is None
    assert "keys and values will not outlive this process" in caplog.text


def test_pool_that_does_not_fit_the_file_is_in_ordinary_memory(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "ftruncate", fail)
    with caplog.at_level("INFO", "triptych"):
        pool, file = open_pool(path)
    pool[:] = 7
    assert file.records is None
    assert "keys and values will not outlive this process: [Errno 27] File too large" in caplog.text


def test_what_was_computed_before_a_crash_is_not_computed_again(path: Path) -> None:
    clients = Clients(prefix_cache=True, kv_path=path, prefill_chunk=64)
    clients.add(make_sequence(1, num_tokens=30, max_tokens=30))
    for _ in range(11):
        clients.step()
    clients.crash()
    step = clients.step()
    assert step is not None
    assert [chunk.num_tokens for chunk in step.plan.chunks] == [41 - 40], "ten pages of four tokens are complete"
    clients.close()
