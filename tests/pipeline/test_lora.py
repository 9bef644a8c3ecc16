"""Adapters through the whole pipeline, on a hash LM whose KV cells depend on the adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.adapters import make_adapter, make_nominal_adapter, merge
from tests.pipeline.checks import assert_quiet, expected
from tests.pipeline.conftest import hash_driver
from tests.pipeline.killing import kill
from tests.tiny import make_tiny_model, prove
from tests.waiting import eventually
from triptych import Driver
from triptych.launch.replay.verify import verify
from triptych.protocol.errors import ConfigError, InvalidRequest, ModelFailed
from triptych.workers.execute.hash_lm import hidden_of, state_of

NAMES = ("", "formal", "rude")  # by their numbers
PROMPT = list(range(40, 140))


@pytest.fixture(name="modules", scope="module")
def fixture_modules(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("adapters")
    return tuple(f"{name}={make_nominal_adapter(folder / name, name.encode())}" for name in NAMES[1:])


@pytest.fixture(name="adapted", scope="module")
def fixture_adapted(modules: tuple[str, ...]) -> Iterator[Driver]:
    # Few pages, so that sequences are preempted and swapped.
    few: dict[str, Any] = {"num_pages": 48, "host_pages": 32, "safety_margin": 0.0}
    with hash_driver(lora_modules=modules, hash_step_ms=1.0, lease_s=30.0, **few) as driver:
        yield driver
        assert_quiet(driver)


def ask_all(driver: Driver, count: int, max_tokens: int, **options: Any) -> list[Any]:
    """Streams of the same prompt, for each adapter in turn and for none."""
    return [driver.submit(PROMPT, max_tokens=max_tokens, lora=NAMES[i % 3], **options) for i in range(count)]


def test_one_batch_has_several_adapters_and_none(adapted: Driver) -> None:
    for index, stream in enumerate(ask_all(adapted, 12, 120)):
        assert stream.result(30).token_ids == expected(PROMPT, 120, adapter=index % 3)
    assert eventually(lambda: adapted.stats()["execute"]["preemptions"]) > 0, "there were few pages"


def test_embedding_is_of_the_adapter(adapted: Driver) -> None:
    for number, name in enumerate(NAMES):
        hidden = hidden_of(state_of(PROMPT, number))
        values = adapted.embed(PROMPT, lora=name).values
        assert values.tolist() == pytest.approx((hidden / np.linalg.norm(hidden)).tolist(), abs=1e-6)


def test_prefixes_are_shared_only_within_an_adapter_and_a_salt(adapted: Driver) -> None:
    prompt = list(range(100, 200))
    seen = []
    for name, salt in [
        ("", "x"),
        ("rude", "x"),
        ("rude", "x"),
        ("", "rude\0x"),
        ("formal", "x"),
        ("rude", ""),
        ("", "x"),
    ]:
        answer = adapted.generate(prompt, max_tokens=4, lora=name, cache_salt=salt)
        assert answer.token_ids == expected(prompt, 4, adapter=NAMES.index(name))
        seen.append(answer.usage["cached_tokens"])
    assert seen == [0, 0, 96, 0, 0, 0, 96]


def test_choices_beams_and_scores_use_the_adapter(adapted: Driver) -> None:
    plain, rude = (
        [
            adapted.generate(PROMPT, max_tokens=6, lora=name, **options)
            for options in ({"n": 3, "temperature": 1.0, "seed": 5}, {"num_beams": 3, "n": 2}, {"prompt_logprobs": 1})
        ]
        for name in ("", "rude")
    )
    for one, other in zip(plain, rude, strict=True):
        assert [choice.token_ids for choice in one.choices] != [choice.token_ids for choice in other.choices]
    assert plain[2].prompt_logprobs != rude[2].prompt_logprobs


@pytest.mark.parametrize("name", ["polite", "RUDE", "rude ", "/etc"])
def test_unknown_adapter_is_refused_with_its_name(adapted: Driver, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"lora is '{name}', known are: formal, rude") as caught:
        adapted.generate(PROMPT, max_tokens=1, lora=name)
    assert caught.value.param == "lora"


def test_pipeline_without_adapters_says_so(driver: Driver) -> None:
    with pytest.raises(InvalidRequest, match="lora is 'rude', known are: none"):
        driver.generate(PROMPT, max_tokens=1, lora="rude")


@pytest.mark.parametrize("role", ["prepare", "execute", "summarize"])
def test_restarted_workers_continue_with_the_same_adapters(adapted: Driver, role: str) -> None:
    streams = ask_all(adapted, 6, 150)
    for stream in streams[:3]:
        next(iter(stream))
    kill(adapted, role)
    for index, stream in enumerate(streams):
        assert stream.result(30).token_ids == expected(PROMPT, 150, adapter=index % 3)


def test_changed_adapter_with_open_requests_is_refused(tmp_path: Path) -> None:
    folder, journal = make_nominal_adapter(tmp_path / "a"), str(tmp_path / "journal")
    options: dict[str, Any] = {"lora_modules": [f"a={folder}"], "journal": journal, "lease_s": 60.0}
    driver = hash_driver(hash_step_ms=5.0, **options).start()
    driver.submit([1, 2], max_tokens=2000, lora="a").accepted(20)
    driver.stop(mode="keep")
    make_nominal_adapter(folder, b"other weights")
    with (
        pytest.raises(ConfigError, match="unanswered requests for the adapter 'a', which has changed"),
        hash_driver(**options),
    ):
        pass


def test_adapter_that_is_missing_is_not_loaded(tmp_path: Path) -> None:
    folder = make_nominal_adapter(tmp_path / "a")
    with hash_driver(lora_modules=[f"a={folder}"]) as driver:
        execute = driver.pids["execute"]
        folder.rename(tmp_path / "b")
        with pytest.raises(ConfigError, match="the adapter 'a' cannot be read"):
            driver.replace("execute", model="hash-lm", timeout=20)
        assert driver.generate([1, 2], max_tokens=4, lora="a").token_ids == expected([1, 2], 4, adapter=1)
        assert driver.pids["execute"] == execute


def test_only_answers_of_an_adapter_whose_files_have_changed_fail_after_a_crash(tmp_path: Path) -> None:
    """The driver gave up: whoever replaced one adapter's files ended every later crash in an outage."""
    folder = make_nominal_adapter(tmp_path / "a")
    with hash_driver(hash_step_ms=5.0, lora_modules=[f"a={folder}"]) as driver:
        with_it, without = (driver.submit([1, 2], max_tokens=400, lora=name) for name in ("a", ""))
        for stream in (with_it, without):
            next(iter(stream))
        make_nominal_adapter(folder, b"other weights")
        kill(driver, "execute")
        with pytest.raises(ModelFailed, match="the adapter 'a' is no longer served"):
            with_it.result(30)
        assert without.result(30).token_ids == expected([1, 2], 400)
        assert driver.generate([1, 2], max_tokens=4, lora="a").token_ids == expected([1, 2], 4, adapter=1)


def test_missing_adapter_is_reported_at_once(tmp_path: Path) -> None:
    with (
        pytest.raises(
            ConfigError, match=r"the adapter 'a' cannot be read: .*/nowhere/adapter_config\.json: No such file"
        ),
        hash_driver(lora_modules=[f"a={tmp_path}/nowhere"]),
    ):
        pass


def test_real_model_continues_with_its_adapter_after_a_kill(tmp_path: Path) -> None:
    checkpoint = make_tiny_model("llama", tmp_path / "model")
    adapter = make_adapter(tmp_path / "a", checkpoint)
    model: Any = AutoModelForCausalLM.from_pretrained(merge(checkpoint, adapter, tmp_path / "merged"))
    output = model.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=60, eos_token_id=None, pad_token_id=0
    )
    prove(checkpoint, lora_modules=(f"a={adapter}",))
    with Driver(str(checkpoint), num_pages=64, lora_modules=[f"a={adapter}"]) as driver:
        stream = driver.submit(PROMPT, max_tokens=60, ignore_eos=True, lora="a")
        next(iter(stream))
        kill(driver, "execute")
        assert stream.result(60).token_ids == output[0, len(PROMPT) :].tolist()
        assert list(driver.info()["model"]["adapters"]) == ["a"]
        assert driver.stats()["execute"]["prefill_tokens"] < len(PROMPT), "its keys and values are those of the weights"


def test_trace_with_adapters_is_replayed_exactly(modules: tuple[str, ...], tmp_path: Path) -> None:
    trace = tmp_path / "steps.jsonl"
    with hash_driver(lora_modules=modules, trace=str(trace), num_pages=40, safety_margin=0.0) as driver:
        for stream in ask_all(driver, 9, 60):
            stream.result(30)
    assert verify(trace).is_exact
    assert verify(trace).num_cached_tokens > 0
    assert not any(name in trace.read_text() for name in NAMES[1:])
