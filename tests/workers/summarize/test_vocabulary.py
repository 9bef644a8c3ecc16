"""The bytes of single tokens, as logprobs report them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.workers import tokenizer_zoo
from tests.workers.tokenizer_zoo import ALL, SENTENCES, id_of
from triptych.protocol.tokenizer_files import TokenizerFacts, save_tokenizer
from triptych.workers.summarize.vocabulary import Vocabulary


@pytest.mark.parametrize("name", ["byte_level", "in_a_sequence", "gemma"])
@pytest.mark.parametrize("sentence", SENTENCES, ids=ascii)
def test_bytes_of_tokens_join_to_the_text(name: str, sentence: str) -> None:
    vocabulary = Vocabulary(ALL[name]())
    ids = vocabulary.tokenizer.encode(sentence).ids
    assert b"".join(map(vocabulary.token_bytes, ids)).decode() == vocabulary.tokenizer.decode(ids)


@pytest.mark.parametrize("name", ALL)
def test_special_token_has_the_bytes_of_its_name(name: str) -> None:
    vocabulary = Vocabulary(ALL[name]())
    assert vocabulary.token_bytes(1).strip() == b"</s>"


@pytest.mark.parametrize("name", ALL)
def test_id_without_a_token_has_no_bytes(name: str) -> None:
    assert Vocabulary(ALL[name]()).token_bytes(10**6) == b""


def test_byte_token_is_its_byte() -> None:
    vocabulary = Vocabulary(tokenizer_zoo.llama2())
    assert vocabulary.token_bytes(id_of(vocabulary.tokenizer, "<0xE2>")) == b"\xe2"


def test_token_that_looks_like_a_byte_is_text_where_the_decoder_knows_no_bytes() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_zoo.metaspace().to_str())
    tokenizer.add_tokens(["<0x41>"])
    assert Vocabulary(tokenizer).token_bytes(id_of(tokenizer, "<0x41>")).strip() == b"<0x41>"


def test_word_in_the_middle_has_its_space() -> None:
    vocabulary = Vocabulary(tokenizer_zoo.llama2())
    assert vocabulary.token_bytes(id_of(vocabulary.tokenizer, "▁do")) == b" do"


def test_vocabulary_is_read_from_the_run_directory(tmp_path: Path) -> None:
    facts = TokenizerFacts(vocab_size=1, chat_template=None, special_tokens={}, bos_token_id=None)
    save_tokenizer(tmp_path, tokenizer_zoo.byte_level().to_str(), facts)
    vocabulary = Vocabulary.load(tmp_path)
    assert vocabulary is not None
    assert vocabulary.is_byte_level
