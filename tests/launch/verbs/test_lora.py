"""Adapters on the command line."""

from __future__ import annotations

import json

import pytest

from tests.adapters import make_nominal_adapter
from tests.launch.conftest import Triptych
from tests.pipeline.checks import expected
from triptych import Driver
from triptych.launch.terminal.report import printable


@pytest.fixture(name="module", scope="module")
def fixture_module(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"rude={make_nominal_adapter(tmp_path_factory.mktemp('adapters') / 'rude')}"


def test_flag_selects_the_adapter_and_a_line_may_select_another(triptych: Triptych, module: str) -> None:
    with Driver("hash-lm", lora_modules=[module]) as driver:
        output = [driver.generate("x", max_tokens=5, lora=name) for name in ("", "rude")]
        assert [each.token_ids for each in output] == [expected([121], 5), expected([121], 5, adapter=1)]
        lines = b'{"prompt": "x", "lora": ""}\nx'
        flags = ("--connect", str(driver.run_dir), "--lora", "rude", "--max-tokens", "5")
        outcome = triptych("generate", *flags, "--raw", "--format", "jsonl", stdin=lines)
        assert [json.loads(line)["text"] for line in outcome.out.splitlines()] == [each.text for each in output]
        question = [{"role": "user", "content": "x"}]
        answer = driver.generate(messages=question, max_tokens=5, lora="rude").text
        assert triptych("chat", *flags, stdin=b"x\n").out == printable(answer) + "\n"


def test_adapter_with_the_model_s_name_is_refused(triptych: Triptych, module: str) -> None:
    outcome = triptych("serve", "--model", "hash-lm", "--lora-modules", module, "--served-model-name", "rude")
    assert (outcome.code, outcome.out) == (2, "")
    assert "lora_modules has an adapter 'rude', which is the model" in outcome.err


def test_module_without_a_path_is_refused(triptych: Triptych) -> None:
    outcome = triptych("generate", "x", "--model", "hash-lm", "--lora-modules", "rude")
    assert outcome.code == 2
    assert "lora_modules is 'rude', the form is NAME=PATH" in outcome.err


def test_running_pipeline_loads_and_unloads_an_adapter(triptych: Triptych, module: str) -> None:
    with Driver("hash-lm") as driver:
        connect = ("--connect", str(driver.run_dir))
        loaded = triptych("load-adapter", module, *connect)
        assert (loaded.code, loaded.out.partition(",")[0]) == (0, "rude is served now")
        assert driver.generate([5, 6], max_tokens=5, lora="rude").token_ids == expected([5, 6], 5, adapter=1)
        again = triptych("load-adapter", module, *connect)
        assert (again.code, again.err.strip()) == (2, "error: the adapter 'rude' is already loaded")
        gone = triptych("unload-adapter", "rude", *connect)
        assert (gone.code, gone.out.partition(",")[0]) == (0, "rude is no longer served")
