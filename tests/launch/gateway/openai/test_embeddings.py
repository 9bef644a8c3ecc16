"""/v1/embeddings on the hash model, whose embeddings are known."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.launch.gateway.conftest import Site
from triptych.launch.gateway.schemas.embeddings import MAX_INPUTS
from triptych.workers.execute.hash_build import MAX_MODEL_LEN
from triptych.workers.execute.hash_lm import EMBEDDING_SIZE, hidden_of, state_of

URL = "/v1/embeddings"
IDS = [5, 6, 7]


def expected(prompt: str | Sequence[int], size: int = EMBEDDING_SIZE) -> Any:
    ids = [1 + byte for byte in prompt.encode()] if isinstance(prompt, str) else prompt
    hidden = hidden_of(state_of(ids))[:size].astype(np.float64)
    return (hidden / np.linalg.norm(hidden)).astype(np.float32)


def values(reply: dict[str, Any]) -> list[Any]:
    return [np.array(row["embedding"], np.float32) for row in reply["data"]]


@pytest.mark.parametrize(
    ("asked", "prompts"),
    [("text", ["text"]), (["a", "bb"], ["a", "bb"]), (IDS, [IDS]), ([IDS, [9]], [IDS, [9]])],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_inputs_are_embedded_in_their_order(api: Site, asked: Any, prompts: list[Any]) -> None:
    reply = api.ask(URL, input=asked, model="hash-lm", user="u")
    assert reply["object"] == "list"
    assert reply["model"] == "hash-lm"
    assert [(row["object"], row["index"]) for row in reply["data"]] == [("embedding", i) for i in range(len(prompts))]
    np.testing.assert_allclose(values(reply), [expected(prompt) for prompt in prompts], atol=1e-7)
    num_tokens = sum(map(len, prompts))
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["total_tokens"]) == (num_tokens, num_tokens)
    [ledger] = reply["usage"]["triptych"]["ledgers"]  # for all of them: it must not be larger than the embeddings
    assert ledger["wall_ms"] == pytest.approx(sum(ledger["stages_ms"].values()))


def test_embeddings_are_encoded_one_by_one(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for all of them would hold the interpreter's lock, and so up every stream, for seconds."""
    dumps, counts = json.dumps, []

    def spy(value: Any, **options: Any) -> str:
        text = dumps(value, **options)
        counts.append(text.count('"embedding":'))
        return text

    monkeypatch.setattr("json.dumps", spy)
    assert len(api.ask(URL, input=["a", "b", "c"])["data"]) == 3
    assert (sum(counts), max(counts)) == (3, 1)


def test_dimensions_in_base64(api: Site) -> None:
    [row] = api.ask(URL, input="text", dimensions=5, encoding_format="base64")["data"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(row["embedding"]), "<f4"), expected("text", 5), atol=1e-7)


def test_instruction_is_put_before_each_text(api: Site) -> None:
    rows = api.ask(URL, input=["a", "b"], prompt_name="query", normalize=True)["data"]
    for row, text in zip(rows, "ab", strict=True):
        np.testing.assert_allclose(row["embedding"], expected(f"find: {text}"), atol=1e-7)


def test_long_input_is_cut_if_that_is_asked_for(api: Site) -> None:
    text = "x" * (MAX_MODEL_LEN + 1)
    status, error = api.refusal(URL, input=text)
    assert (status, error["param"]) == (400, "input")
    reply = api.ask(URL, input=text, truncate_prompt_tokens=-1)
    assert reply["usage"]["prompt_tokens"] == MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (URL, {"input": ["ab", "abc", "abcde"]}),
        ("/v1/completions", {"prompt": ["ab", "abc", "abcde"], "n": 2, "max_tokens": 1}),
    ],
)
def test_tokens_cut_from_all_prompts_are_counted(api: Site, route: str, body: dict[str, Any]) -> None:
    assert api.ask(route, **body, truncate_prompt_tokens=2)["usage"]["triptych"]["truncated_tokens"] == 0 + 1 + 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": 3}, "input"),
        ({}, "input"),
        ({"input": "a", "dimensions": EMBEDDING_SIZE + 1}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "prompt_name": "other"}, "prompt_name"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "model": "other"}, "model"),
        ({"input": "a", "messages": []}, "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_embedded_is_refused_by_name(api: Site, body: dict[str, Any], param: str) -> None:
    status, error = api.refusal(URL, **body)
    assert (status, error["param"]) == (404 if param == "model" else 400, param)
