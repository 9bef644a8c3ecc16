"""Structured answers through the whole pipeline, checked independently with ``jsonschema`` and ``re``."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from transformers import PreTrainedTokenizerFast

from tests.pipeline.checks import assert_quiet, expected
from tests.pipeline.conftest import hash_driver
from tests.proc import children_of, is_alive
from tests.tiny import build_tiny_model, prove
from tests.waiting import eventually
from tests.workers import tokenizer_zoo
from triptych import Driver
from triptych.protocol.errors import InvalidRequest

COMPACT = {"x-guidance": {"whitespace_flexible": False}}
SHORT = {"type": "string", "maxLength": 8}
SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "a": {
                "type": "object",
                "properties": {"b": {"type": "object", "properties": {"c": SHORT}, "additionalProperties": False}},
                "additionalProperties": False,
            },
            "n": {"type": "null"},
        },
        "required": ["a", "n"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "green", 3, None, {"x": [1, 2]}]},
    "integer": {"type": "integer", "minimum": -5, "maximum": 120},
    "number": {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "union": {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "array", "items": SHORT}]},
    "format": {"type": "string", "format": "date"},
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "v": {"enum": [1, 2]},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
                },
                "required": ["v", "kids"],
                "additionalProperties": False,
            }
        },
    },
}
EXPRESSIONS = (
    r"[a-z]{3} (yes|no)", r"\d{4}-\d{2}-\d{2}", r"(foo|ba[rz]){1,5}!", r"a/b\\[0-9]", r"x?[äöü]{2}", r" leading",
)  # fmt: skip
CHOICES = ("alpha", "beta\n", 'quote "', "日本", " yes")


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 37 ids more than its tokenizer, which has byte fallback."""
    folder = tmp_path_factory.mktemp("pieces")
    tokenizer = tokenizer_zoo.llama2()
    special: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    eos = tokenizer_zoo.id_of(tokenizer, "</s>")
    build_tiny_model("llama", vocab_size=tokenizer.get_vocab_size() + 37, eos_token_id=eos).save_pretrained(folder)
    prove(folder, "float32")
    return folder


@pytest.fixture(scope="module", params=["demo", "hash-lm", "sentence_piece"])
def model(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Together they cover each kind of tokenizer."""
    name: str = request.param
    options: dict[str, Any] = {}
    if name == "sentence_piece":
        name, options = str(request.getfixturevalue(name)), {"dtype": "float32"}
    with Driver(name, lease_s=60.0, num_pages=512, **options) as driver:
        yield driver
        assert_quiet(driver)


def ask(driver: Driver, structured: dict[str, Any], **options: Any) -> Any:
    return driver.submit("Answer:", structured=structured, **{"max_tokens": 400, "temperature": 1.0, **options})


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_that_end_by_themselves_are_valid(model: Driver, name: str) -> None:
    schema = {**SCHEMAS[name], **COMPACT}
    answers = [ask(model, {"json_schema": schema}, seed=seed) for seed in range(2)]
    answers.append(ask(model, {"json_schema": schema}, temperature=0.0))
    stopped = [a for a in (answer.result(60) for answer in answers) if a.finish_reason == "stop"]
    for answer in stopped:
        Draft202012Validator(schema).validate(json.loads(answer.text))
    assert stopped  # how many depends on the vocabulary, which a trainer chooses anew where pairs are equally frequent


def test_white_space_is_limited(model: Driver) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for seed in range(4):
        answer = ask(model, {"json_schema": schema}, seed=seed).result(60)
        assert answer.finish_reason == "stop"
        assert set(json.loads(answer.text)) == {"a", "b"}


def test_json_object_gives_any_object(model: Driver) -> None:
    answers = [ask(model, {"json_object": True}, seed=seed).result(60) for seed in range(4)]
    assert all(answer.text.startswith("{") for answer in answers)
    assert all(type(json.loads(a.text)) is dict for a in answers if a.finish_reason == "stop")


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_regular_expression_matches_the_whole_answer(model: Driver, expression: str) -> None:
    for answer in [ask(model, {"regex": expression}, seed=seed) for seed in range(4)]:
        result = answer.result(60)
        assert re.fullmatch(expression, result.text), result.text
        assert result.finish_reason == "stop"


def test_choice_is_exactly_one_of_the_options(model: Driver) -> None:
    answers = [ask(model, {"choice": list(CHOICES)}, seed=seed).result(60) for seed in range(12)]
    assert {answer.text for answer in answers} <= set(CHOICES)
    assert {answer.finish_reason for answer in answers} == {"stop"}


def test_grammar_counts(model: Driver) -> None:
    grammar = 'start: "(" start ")" | "."'
    for seed in range(4):
        answer = ask(model, {"grammar": grammar}, seed=seed).result(60)
        text = answer.text
        if answer.finish_reason == "stop":
            assert text == "(" * (len(text) // 2) + "." + ")" * (len(text) // 2)
        else:
            assert re.fullmatch(r"\(+\.?\)*", text)


def test_structured_works_with_all_sampling_parameters(model: Driver) -> None:
    options: dict[str, Any] = {
        "logprobs": 2, "repetition_penalty": 1.2, "presence_penalty": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01,
        "logit_bias": {5: 2.0}, "seed": 3,
    }  # fmt: skip
    first = ask(model, {"regex": "[a-z ]{10,20}"}, **options).result(60)
    assert re.fullmatch("[a-z ]{10,20}", first.text)
    assert len(first.logprobs) == len(first.token_ids)
    assert ask(model, {"regex": "[a-z ]{10,20}"}, **options).result(60).token_ids == first.token_ids


@pytest.mark.parametrize("model", ["demo", "sentence_piece"], indirect=True)  # the hash model ignores min_tokens
def test_min_tokens_prolongs_an_answer_unless_the_grammar_ends_it(model: Driver) -> None:
    long = ask(model, {"regex": "[a-z]{1,60}"}, min_tokens=50, max_tokens=200, seed=1).result(60)
    assert re.fullmatch("[a-z]{1,60}", long.text)
    assert len(long.text) >= 45
    short = ask(model, {"choice": ["yes", "no"]}, min_tokens=50, skip_special_tokens=False).result(60)
    assert (short.text in ("yes", "no"), short.finish_reason) == (True, "stop")


def test_stop_string_ends_the_answer_before_the_grammar_does(model: Driver) -> None:
    answer = ask(model, {"regex": "aaaabbbb"}, stop="abb").result(60)
    assert (answer.text, answer.finish_reason) == ("aaa", "stop")


def test_neighbours_are_unaffected(model: Driver) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0}
    alone = [model.submit("Neighbour", seed=seed, **options).result(60).text for seed in range(3)]
    forms: list[dict[str, Any]] = [{"regex": "[a-z]{50}"}, {"json_object": True}, {"choice": ["a", "b"]}]
    structured = [ask(model, form, seed=1) for form in forms]
    together = [model.submit("Neighbour", seed=seed, **options) for seed in range(3)]
    assert [answer.result(60).text for answer in together] == alone
    assert [len(answer.result(60).text) > 0 for answer in structured] == [True] * 3


def test_unknown_keyword_is_refused_with_its_name_and_others_are_served(model: Driver) -> None:
    other = model.submit("Other", max_tokens=5)
    with pytest.raises(InvalidRequest, match="uniqueItems") as caught:
        ask(model, {"json_schema": {"type": "array", "uniqueItems": True}}).result(30)
    assert caught.value.param == "structured"
    assert other.result(30).finish_reason


@pytest.mark.parametrize("model", ["hash-lm", "sentence_piece"], indirect=True)
def test_kill_of_execute_changes_no_text(model: Driver) -> None:
    array = {"type": "array", "items": SHORT, "minItems": 30}
    forms: list[dict[str, Any]] = [{"regex": "[a-z ]{150}"}, {"json_schema": array}]
    before = [ask(model, form, seed=5, max_tokens=150).result(60) for form in forms]
    streams = [ask(model, form, seed=5, max_tokens=150) for form in forms]
    next(iter(streams[0]))
    os.kill(eventually(lambda: model.pids["execute"]), signal.SIGKILL)
    assert [stream.result(120).token_ids for stream in streams] == [answer.token_ids for answer in before]


def test_preemption_changes_no_text() -> None:
    forms = [{"regex": f"[a-z ]{{{count}}}"} for count in range(100, 140, 5)]
    with hash_driver(num_pages=200, lease_s=30.0) as driver:
        alone = [ask(driver, form, seed=1).result(60).text for form in forms]
    with hash_driver(num_pages=24, lease_s=30.0, prefix_cache=False) as driver:
        for form in forms:  # compiled, so that all of them start at the same time
            ask(driver, form, max_tokens=1).result(60)
        streams = [ask(driver, form, seed=1) for form in forms]
        assert [stream.result(60).text for stream in streams] == alone
        eventually(lambda: driver.stats()["execute"]["preemptions"] > 0)
        assert_quiet(driver)


def test_slow_grammar_delays_no_other_request() -> None:
    slow = {"json_schema": {"type": "integer", "multipleOf": 12345677}}
    with hash_driver(grammar_timeout_s=3.0, grammar_bytes=1 << 31) as driver:
        driver.submit("x", structured={"regex": "warm"}).result(30)
        refused = driver.submit("x", structured=slow)
        others = [driver.submit([i + 1, 5], max_tokens=5) for i in range(20)]
        assert [other.result(30).token_ids for other in others] == [expected([i + 1, 5], 5) for i in range(20)]
        assert not refused.done
        with pytest.raises(InvalidRequest, match=r"takes longer than 3\.0 s"):
            refused.result(30)
        assert driver.submit("x", structured={"regex": "next"}).result(30).text == "next"
        assert driver.stats()["restarts"] == {"prepare": 0, "execute": 0, "summarize": 0}
        assert_quiet(driver)


def test_kill_of_prepare_leaves_no_compiler_process() -> None:
    with hash_driver() as driver:
        assert driver.submit("x", structured={"regex": "one"}).result(30).text == "one"
        children = children_of(driver.pids["prepare"] or 0)
        assert len(children) == 1
        os.kill(eventually(lambda: driver.pids["prepare"]), signal.SIGKILL)
        eventually(lambda: not is_alive(children[0]))
        assert driver.submit("x", structured={"regex": "two"}).result(30).text == "two"
        children = children_of(driver.pids["prepare"] or 0)
    eventually(lambda: not is_alive(children[0]))
