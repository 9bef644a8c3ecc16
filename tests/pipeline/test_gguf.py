"""GGUF files through the whole pipeline: served, guessed with, changed to, and found again after a kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pipeline.checks import assert_quiet
from tests.pipeline.killing import kill
from tests.tiny import prove
from tests.workers.execute.model.checkpoint.gguf_files import Type, make_gguf
from triptych import Driver
from triptych.workers.execute.model.checkpoint.find import find_checkpoint
from triptych.workers.execute.user_cache import cache_folder

PROMPTS = ["the hello", "é 123", "a"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file, and a cache that has the kernels and no model."""
    folder = tmp_path_factory.mktemp("gguf")
    kernels = cache_folder() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / "cache" / "triptych").mkdir(parents=True)
    (folder / "cache" / "triptych" / "kernels").symlink_to(kernels)
    make_gguf(folder / "x.gguf", type_=Type.Q8_0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder / "x.gguf"


@pytest.fixture(scope="module")
def driver(file: Path) -> Iterator[Driver]:
    with Driver(str(file), dtype="float32", num_pages=64, draft_model=str(file), lease_s=60.0) as driver:
        yield driver
        assert_quiet(driver)


def generate(file: Path, prompt: str) -> str:
    """The greedy answer of transformers, which reads the file in its own way."""
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = torch.tensor([[1, *tokenizer.encode(prompt, add_special_tokens=False)]])
    out = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=[2, 262], pad_token_id=0)
    text: str = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return text


def ask(driver: Driver, prompt: str) -> str:
    return str(driver.submit(prompt, max_tokens=24).result(60).text)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_equals_generate(prompt: str, driver: Driver, file: Path) -> None:
    assert ask(driver, prompt) == generate(file, prompt)


def test_a_chat_uses_the_template_of_the_file(driver: Driver) -> None:
    messages = [{"role": "user", "content": "the"}]
    answer = driver.submit(messages=messages, max_tokens=24).result(60)
    assert answer.text == ask(driver, "<|im_start|>the<|im_end|>")


def test_a_killed_execute_finds_what_was_unpacked(driver: Driver, file: Path) -> None:
    before, folder = ask(driver, "the hello"), cache_folder() / "gguf"
    made = {entry: entry.stat().st_ino for entry in folder.iterdir()}
    kill(driver, "execute")
    assert ask(driver, "the hello") == before
    assert {entry: entry.stat().st_ino for entry in folder.iterdir()} == made


def test_execute_is_replaced_by_one_with_another_file(driver: Driver, file: Path) -> None:
    make_gguf(file.with_name("y.gguf"), type_=Type.F16, initializer_range=0.3)
    prove(find_checkpoint(str(file.with_name("y.gguf")), dtype="float32"), "float32")
    driver.replace("execute", model=str(file.with_name("y.gguf")))
    assert ask(driver, "the hello") == generate(file.with_name("y.gguf"), "the hello")
    driver.replace("execute", model=str(file))  # which other tests expect
    assert ask(driver, "the hello") == generate(file, "the hello")
