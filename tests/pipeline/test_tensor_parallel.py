"""A model on two ranks through the whole pipeline."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.adapters import make_adapter, merge
from tests.pipeline.checks import assert_quiet
from tests.tiny import make_tiny_model
from tests.waiting import eventually
from triptych import Driver
from triptych.protocol.errors import WorkerDied

PROMPTS = ["Hello, world", "a", "The quick brown fox jumps over the lazy dog. " * 3]
MAX_TOKENS = 40
OPTIONS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
# One rank, and no other process, gets too little memory to import torch.
STARVED_RANK = """
import resource, sys
if any(argument.endswith("execute.rank") for argument in sys.orig_argv):
    resource.setrlimit(resource.RLIMIT_AS, (200 << 20, 200 << 20))
"""


def make_driver(folder: Path, **options: Any) -> Driver:
    return Driver(
        str(folder), dtype="float32", device="cpu", num_pages=128, threads=1, tensor_parallel_size=2, **options
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"))


def expected_tokens(folder: Path) -> list[list[int]]:
    """What transformers generates in one process."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        output = model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        answers.append(output[0, ids.shape[1] :].tolist())
    return answers


def find_rank(driver: Driver) -> psutil.Process | None:
    """The other rank, once it exists."""
    execute = driver.pids["execute"]
    children = psutil.Process(execute).children() if execute else []
    return next((child for child in children if any(a.endswith("execute.rank") for a in child.cmdline())), None)


def wait_for_end(rank: psutil.Process) -> None:
    eventually(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.slow
def test_two_ranks_answer_like_transformers_even_after_one_is_killed(folder: Path, tmp_path: Path) -> None:
    """With an adapter, too, compared with merged weights. The death of one rank ends both."""
    adapter = make_adapter(tmp_path / "a", folder)
    plain, merged = expected_tokens(folder), expected_tokens(merge(folder, adapter, tmp_path / "merged"))
    expected = [plain[0], *merged[1:]]
    asked = [*zip(PROMPTS, ("", "a", "a"), strict=True)]
    with make_driver(folder, lora_modules=[f"a={adapter}"]) as driver:
        assert [completion.token_ids for completion in driver.generate_all(PROMPTS, **OPTIONS)] == plain
        rank = eventually(lambda: find_rank(driver))
        streams = [driver.submit(prompt, lora=name, **OPTIONS) for prompt, name in asked]
        next(iter(streams[0]))
        os.kill(rank.pid, signal.SIGKILL)
        assert [stream.result(100).token_ids for stream in streams] == expected
        assert_quiet(driver)
        rank = eventually(lambda: find_rank(driver))
        os.kill(eventually(lambda: driver.pids["execute"]), signal.SIGKILL)
        wait_for_end(rank)


def test_rank_that_cannot_start_says_why(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(STARVED_RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(WorkerDied) as caught:
        make_driver(folder).start()
    assert "Traceback" in str(caught.value)
    assert "tensor-parallel rank 1 ended with exit code 1" in str(caught.value)
