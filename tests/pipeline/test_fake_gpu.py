"""Three processes with a model on the fake CUDA device: execute is killed and continues."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import HAS_GPU
from tests.pipeline.checks import assert_quiet
from tests.pipeline.killing import kill
from tests.workers.execute.model.native import make_checkpoint
from triptych import Driver

pytest.importorskip("triton")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(HAS_GPU, reason="there is a real device")]

PROMPTS, MAX_TOKENS = ([5, 6, 7], [8, 9]), 16


@pytest.fixture(name="fake_gpu")
def fixture_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    for folder in (root, root / "tests" / "pipeline" / "fake_gpu"):
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def answers(driver: Driver, *, is_killed: bool) -> Iterator[list[int]]:
    """The tokens of every prompt; execute is killed once the first has some."""
    streams = [driver.submit(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    first = next(iter(streams[0]))
    assert first.token_ids
    if is_killed:
        kill(driver, "execute")
    for stream in streams:
        yield stream.result(60).token_ids


def test_killed_execute_continues_on_its_gpu(fake_gpu: None, tmp_path: Path) -> None:
    checkpoint = str(make_checkpoint("qwen3", tmp_path / "checkpoint", num_hidden_layers=1))
    options: dict[str, Any] = {"max_num_seqs": 2, "prefill_chunk": 8, "dtype": "float32", "threads": 1}
    with Driver(checkpoint, device="cpu", **options) as driver:
        expected = list(answers(driver, is_killed=False))
    with Driver(checkpoint, device="cuda", **options) as driver:
        assert {"device": "cuda", "backend": "fused float32"}.items() <= driver.info()["model"].items()
        assert list(answers(driver, is_killed=True)) == expected
        assert driver.stats()["restarts"]["execute"] == 1
        assert_quiet(driver)
