"""How the text of an answer begins, depending on its record."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.protocol.factories import make_record
from tests.workers import tokenizer_zoo
from triptych.protocol.record import RequestRecord
from triptych.workers.summarize.stream import OutputStream
from triptych.workers.summarize.texts import Texts
from triptych.workers.summarize.vocabulary import Vocabulary

EOS = 1


@pytest.mark.parametrize(
    ("fields", "begins"),
    [({}, "quick"), ({"continues_prompt": True}, " quick"), ({"grammar": "start: / quick/"}, " quick")],
    ids=["chat", "completion", "form"],
)
def test_leading_space_of_an_answer(fields: dict[str, Any], begins: str) -> None:
    """A SentencePiece decoder drops the space before the first word of a text."""
    tokenizer = tokenizer_zoo.llama2()
    stream = opened(tokenizer, replace(make_record(), **fields))
    stream.push(tokenizer.encode("quick").ids)
    stream.finish("length")
    assert stream.text == begins


@pytest.mark.parametrize(
    ("sampling", "grammar", "token_ids"),
    [
        ({}, "", [EOS]),
        ({"ignore_eos": True}, "", [EOS, 5, 6]),
        ({"min_tokens": 4, "stop_token_ids": [5]}, "", [EOS, 5, 6]),
        ({"min_tokens": 4, "stop_token_ids": [5]}, "start: /x/", [EOS]),
    ],
    ids=["eos", "ignored", "too early", "end of a form"],
)
def test_where_an_answer_ends(sampling: dict[str, Any], grammar: str, token_ids: list[int]) -> None:
    stream = opened(tokenizer_zoo.llama2(), replace(make_record(**sampling), grammar=grammar))
    stream.push([EOS, 5, 6])
    assert stream.token_ids == token_ids


def opened(tokenizer: Any, record: RequestRecord) -> OutputStream:
    context, card = SimpleNamespace(journal=None, intent=None), SimpleNamespace(eos_token_ids=[EOS])
    texts = Texts(cast(Any, context), cast(Any, card), Vocabulary(tokenizer), cast(Any, None))
    return texts.open(cast(Any, SimpleNamespace(record=record)))
