"""How the text of an answer begins, depending on its record."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.protocol.factories import make_record
from tests.workers import tokenizer_zoo
from triptych.workers.summarize.texts import Texts
from triptych.workers.summarize.vocabulary import Vocabulary


@pytest.mark.parametrize(
    ("fields", "begins"),
    [({}, "quick"), ({"continues_prompt": True}, " quick"), ({"grammar": "start: / quick/"}, " quick")],
    ids=["chat", "completion", "form"],
)
def test_leading_space_of_an_answer(fields: dict[str, Any], begins: str) -> None:
    """A SentencePiece decoder drops the space before the first word of a text."""
    tokenizer = tokenizer_zoo.llama2()
    context, card = SimpleNamespace(journal=None, intent=None), SimpleNamespace(eos_token_ids=[1])
    texts = Texts(cast(Any, context), cast(Any, card), Vocabulary(tokenizer), cast(Any, None))
    stream = texts.open(cast(Any, SimpleNamespace(record=replace(make_record(), **fields))))
    stream.push(tokenizer.encode("quick").ids)
    stream.finish("length")
    assert stream.text == begins
