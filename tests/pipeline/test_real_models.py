"""Real models through the whole pipeline: equal to transformers, and to Python's own documentation."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pipeline.checks import assert_quiet
from tests.pipeline.killing import kill
from tests.tiny import make_tiny_model, prove
from tests.waiting import eventually
from tests.workers.execute.model.native.decoders import make_checkpoint, make_pair
from triptych import Driver
from triptych.launch.demo_model.entries import OFF_TOPIC_ANSWER, PHRASINGS, load_entries
from triptych.workers.execute.kernels.compile import available_levels

PROMPTS = ["Hello, world", "a", "The quick brown fox jumps over the lazy dog. " * 3, "naïve café 😀", "1 2 3"]


def ask(driver: Driver, question: str, **options: Any) -> Any:
    return driver.submit(messages=[{"role": "user", "content": question}], max_tokens=None, **options)


def test_every_builtin_is_answered_with_its_documentation(demo_driver: Driver) -> None:
    """In other dtypes and phrasings: tests/workers/execute/model/native/test_demo.py."""
    entries = load_entries()
    streams = [
        ask(demo_driver, PHRASINGS[index % len(PHRASINGS)].format(name=entry.name))
        for index, entry in enumerate(entries)
    ]
    wrong = [e.name for e, s in zip(entries, streams, strict=True) if s.result(240).text != e.answer]
    assert len(wrong) <= 0.05 * len(entries), wrong
    assert ask(demo_driver, "Who won the world cup in 1998?").result(60).text == OFF_TOPIC_ANSWER
    assert_quiet(demo_driver)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    prove(folder, "float32")
    return folder


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Driver]:
    with Driver(str(folder), dtype="float32", num_pages=256, prefill_chunk=7, lease_s=60.0) as driver:
        yield driver
        assert_quiet(driver)


def test_answers_with_experts_and_8_bit_pages_are_unchanged_after_a_kill(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("mixtral", tmp_path / "model")
    prove(checkpoint, "bfloat16", kv_dtype="int8")
    options: dict[str, Any] = {"num_pages": 64, "prefill_chunk": 7, "num_speculative_tokens": 4}
    with Driver(str(checkpoint), dtype="bfloat16", kv_dtype="int8", **options) as driver:
        streams = [driver.submit(prompt, max_tokens=120, ignore_eos=True) for prompt in PROMPTS]
        next(iter(streams[0]))
        kill(driver, "execute")
        disturbed = [stream.result(60).token_ids for stream in streams]
        alone = [driver.generate(prompt, max_tokens=120, ignore_eos=True).token_ids for prompt in PROMPTS]
        assert disturbed == alone
        assert driver.info()["model"]["backend"] == f"native bfloat16, int8 keys and values on {available_levels()[0]}"
        assert_quiet(driver)


def test_answers_with_recurrent_layers_are_unchanged_after_a_kill(tmp_path: Path) -> None:
    """On transformers' modules, where sequences resume in the same way: ``test_families.py`` of the model."""
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}  # the compiled kernels need multiples of 16
    checkpoint = make_tiny_model("qwen3_5_text", tmp_path / "model", **sizes)
    prove(checkpoint, "float32")
    params: list[dict[str, Any]] = [{}, {"temperature": 0.7, "seed": 1}, {"n": 3, "temperature": 1.0, "seed": 2}]
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    with Driver(str(checkpoint), dtype="float32", num_pages=64, prefill_chunk=7, lease_s=60.0) as driver:
        streams = [driver.submit(PROMPTS[2], **options, **each) for each in params]
        next(iter(streams[0]))
        kill(driver, "execute")
        disturbed = [[choice.result(60).token_ids for choice in stream.choices] for stream in streams]
        alone = [driver.submit(PROMPTS[2], **options, **each) for each in params]
        assert disturbed == [[choice.result(60).token_ids for choice in stream.choices] for stream in alone]
        assert disturbed[0] == [generate(checkpoint, PROMPTS[2], 60)]
        assert driver.info()["model"]["backend"].startswith("native")
        again = driver.generate(PROMPTS[2], **options)
        assert (again.token_ids, again.ledger["num_cached_tokens"] > 0) == (disturbed[0][0], True)
        beams = driver.generate(PROMPTS[2], num_beams=3, max_tokens=12, ignore_eos=True)
        assert beams.token_ids == generate(checkpoint, PROMPTS[2], 12, num_beams=3)
        assert_quiet(driver)


def generate(folder: Path, prompt: str, num_tokens: int, **options: Any) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0, **options)
    return [int(i) for i in output[0, ids.shape[1] :]]


def test_greedy_text_equals_generate(tiny: Driver, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    completions = tiny.generate_all(PROMPTS, max_tokens=40)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        reference = generate(folder, prompt, 40)
        assert completion.token_ids == reference
        assert completion.text == tokenizer.decode(reference, skip_special_tokens=True)


def test_speculation_changes_no_token_even_after_a_kill(tiny: Driver, folder: Path) -> None:
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.3, "seed": 1},
        {"repetition_penalty": 1.2},
        {"logprobs": 1},
    ]
    texts = [("ab " * 20, each) for each in options]
    plain = [tiny.submit(text, max_tokens=150, ignore_eos=True, **each) for text, each in texts]
    with Driver(str(folder), dtype="float32", num_pages=256, lease_s=60.0, num_speculative_tokens=8) as driver:
        streams = [driver.submit(text, max_tokens=150, ignore_eos=True, **each) for text, each in texts]
        next(iter(streams[0]))
        os.kill(eventually(lambda: driver.pids["execute"]), signal.SIGKILL)
        outputs = [stream.result(120).token_ids for stream in streams]
        again = driver.generate(texts[0][0], max_tokens=150, ignore_eos=True)
        stats = eventually(lambda: stats_with_guesses(driver))
        assert_quiet(driver)
    assert outputs == [stream.result(60).token_ids for stream in plain]
    assert again.token_ids == outputs[0]
    assert stats["accepted_tokens"] <= stats["proposed_tokens"]


def stats_with_guesses(driver: Driver, least: int = 1) -> dict[str, Any] | None:
    """Of execute, once that many guesses were right: its statistics are published later than its tokens."""
    stats: dict[str, Any] = driver.stats()["execute"]
    return stats if stats["accepted_tokens"] >= least else None


def test_answers_with_a_draft_model_are_unchanged_after_a_kill(tmp_path: Path) -> None:
    """That they are those without one: ``draft/test_model.py``, of the model."""
    checkpoint, draft = make_pair(tmp_path)
    for each in (checkpoint, draft):
        prove(each)
    params: list[dict[str, Any]] = [{}, {"temperature": 0.7, "seed": 1}, {"temperature": 0.7, "top_p": 0.8, "seed": 2}]
    options: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True}
    with Driver(str(checkpoint), draft_model=str(draft), num_speculative_tokens=4, num_pages=64) as driver:
        streams = [driver.submit("ab", **options, **each) for each in params]
        next(iter(streams[0]))
        os.kill(eventually(lambda: driver.pids["execute"]), signal.SIGKILL)
        outputs = [stream.result(120).token_ids for stream in streams]
        again = [driver.generate("ab", **options, **each).token_ids for each in params]
        stats = eventually(lambda: stats_with_guesses(driver, least=101))
        assert_quiet(driver)
        assert not list(driver.run_dir.glob("draft*"))
    assert outputs == again
    assert stats["accepted_tokens"] == stats["proposed_tokens"]


# Which models are refused, and why: tests/workers/execute/model/modules/test_loader.py and test_self_test.py.
