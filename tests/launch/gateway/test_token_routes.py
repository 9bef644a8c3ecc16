"""/tokenize and /detokenize: a text that takes long delays no one else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any
from unittest.mock import PropertyMock

import pytest

from tests.launch.gateway.conftest import Site
from triptych.launch.gateway.state import Gateway

PATIENCE_S = 10.0


class SlowWords:
    """A tokenizer that finishes when the test allows it."""

    def __init__(self) -> None:
        self.begun, self.go_on = Event(), Event()
        self.was_told = False

    def encode(self, *_: Any, **__: Any) -> list[int]:
        self._wait()
        return [1, 2]

    def decode(self, *_: Any, **__: Any) -> str:
        self._wait()
        return "text"

    def _wait(self) -> None:
        self.begun.set()
        self.was_told = self.go_on.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a long text"}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": 1, "echo": True}),
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": 1, "echo": True, "stream": True}),
        ("/v1/decisions", {"state": "x", "questions": [{"question": "?", "options": ["a", "b"]}]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_others_are_answered_while_a_text_is_tokenized(
    api: Site, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    words = SlowWords()
    monkeypatch.setattr("triptych.launch.gateway.requests.generation.LONG_TOKENS", 0)
    monkeypatch.setitem(vars(api.gateway), "words", words)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(api.post, path, **body)
        try:
            assert words.begun.wait(PATIENCE_S)
            assert api.http.get("/version").status_code == 200
        finally:
            words.go_on.set()
        assert reply.result(PATIENCE_S).status_code in (200, 400)  # this tokenizer gives an option no tokens
    assert words.was_told


def test_text_is_restored_from_its_tokens(api: Site) -> None:
    reply = api.ask("/tokenize", prompt="hello", return_token_strs=True)
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert api.ask("/detokenize", tokens=reply["tokens"], skip_special_tokens=True)["prompt"] == "hello"


def test_only_tokens_of_the_model_are_restored(api: Site) -> None:
    vocab_size = api.gateway.card.vocab_size
    assert api.post("/detokenize", tokens=[0, vocab_size - 1]).status_code == 200
    for foreign in (-1, vocab_size):
        status, error = api.refusal("/detokenize", tokens=[0, foreign])
        assert (status, error["param"]) == (400, "tokens[1]")
    status, error = api.refusal("/detokenize", tokens=[0], model="another")
    assert (status, error["param"]) == (404, "model")


def test_model_card_is_not_read_for_each_token(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at its file for each of a million tokens took seconds."""
    card = PropertyMock(return_value=api.gateway.card)
    monkeypatch.setattr(Gateway, "card", card)
    assert api.post("/detokenize", tokens=[1] * 100).status_code == 200
    assert card.call_count < 10
