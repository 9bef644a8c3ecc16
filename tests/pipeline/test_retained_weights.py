"""Packed weights outlive a process of execute, also one that died by its own fault."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.pipeline.killing import has_stepped, kill, num_steps
from tests.waiting import eventually
from triptych import Driver
from triptych.protocol.config import DEMO_CHECKPOINT
from triptych.protocol.run_dir import weights_path
from triptych.workers.execute.kernels.memory import HUGE_PAGE, HugeArena

FOUND = "the packed weights of an earlier process are in memory"
PROMPT = "What does len do?"


@pytest.fixture(scope="module", autouse=True)
def _needs_huge_pages() -> None:
    file = os.memfd_create("weights")
    os.ftruncate(file, HUGE_PAGE)
    try:
        HugeArena(HUGE_PAGE, file, 0)
    except OSError as error:
        pytest.skip(str(error))
    finally:
        os.close(file)


def answer(driver: Driver) -> list[int]:
    return driver.generate(PROMPT, max_tokens=20, ignore_eos=True).token_ids


def has_found_weights(driver: Driver) -> bool:
    return FOUND in (driver.run_dir / "execute.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda number: number.name)
def test_next_process_goes_on_with_them(number: signal.Signals) -> None:
    with Driver("demo", device="cpu", threads=1, num_pages=64) as driver:
        expected, before = answer(driver), num_steps(driver)
        stream = driver.submit(PROMPT, max_tokens=200, ignore_eos=True)
        next(iter(stream))
        os.kill(driver.pids["execute"] or 0, number)
        eventually(lambda: has_stepped(driver, before))
        assert stream.result(60).token_ids[: len(expected)] == expected
        assert has_found_weights(driver)


def test_changed_files_are_packed_again(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    shutil.copytree(DEMO_CHECKPOINT, checkpoint)
    with Driver(str(checkpoint), device="cpu", threads=1, num_pages=64) as driver:
        before = answer(driver)
        kill(driver, "execute")
        assert answer(driver) == before
        assert has_found_weights(driver)
        _change(checkpoint)
        kill(driver, "execute")
        after = answer(driver)
        assert after != before
        assert not has_found_weights(driver)
        kill(driver, "execute")
        assert answer(driver) == after
        assert has_found_weights(driver)


def _change(checkpoint: Path) -> None:
    """As a new version of the model is put in its place."""
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, file.with_suffix(".new"), {"format": "pt"})
    file.with_suffix(".new").replace(file)


def test_memory_is_that_of_execute_and_ends_with_the_pipeline() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with Driver("demo", device="cpu", threads=1, num_pages=64) as driver:
        maps = {role: Path(f"/proc/{pid}/maps").read_text() for role, pid in driver.pids.items()}
        assert {role for role, text in maps.items() if "triptych-weights" in text} == {"execute"}
        assert all(line.split()[1] == "r--s" for line in maps["execute"].splitlines() if "triptych-weights" in line)
        link = weights_path(driver.run_dir)
        assert os.stat(link).st_blocks
    assert not link.is_symlink()
    assert set(os.listdir("/proc/self/fd")) <= before
