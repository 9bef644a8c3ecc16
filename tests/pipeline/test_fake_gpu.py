"""Three processes with a model and its draft model on the fake CUDA device: execute is killed and continues."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import HAS_GPU
from tests.pipeline.checks import assert_quiet
from tests.pipeline.killing import kill
from tests.workers.execute.model.native.decoders import greedy, make_checkpoint
from triptych import Driver

pytest.importorskip("triton")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(HAS_GPU, reason="there is a real device")]

PROMPTS, MAX_TOKENS = ([5, 6, 7], [8, 9]), 32  # of which five come in a step


@pytest.fixture(name="fake_gpu")
def fixture_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    for folder in (root, root / "tests" / "pipeline" / "fake_gpu"):
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def test_killed_execute_continues_on_its_gpu(fake_gpu: None, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    checkpoint = make_checkpoint("qwen3", tmp_path / "checkpoint", num_hidden_layers=1, **heads)
    options: dict[str, Any] = {"max_num_seqs": 2, "prefill_chunk": 8, "num_pages": 32, "dtype": "float32"}
    with Driver(str(checkpoint), device="cuda", draft_model=str(checkpoint), **options) as driver:
        assert {"device": "cuda", "backend": "fused float32"}.items() <= driver.info()["model"].items()
        streams = [driver.submit(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) for prompt in PROMPTS]
        assert next(iter(streams[0])).token_ids
        kill(driver, "execute")
        answers = [stream.result(240).token_ids for stream in streams]
        assert driver.stats()["restarts"]["execute"] == 1
        assert driver.stats()["execute"]["accepted_tokens"] > 0
        assert_quiet(driver)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert answers == [greedy(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
