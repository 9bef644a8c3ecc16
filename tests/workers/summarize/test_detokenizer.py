"""Pieces join to the full decode for any ids, and little text is held back."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.workers import tokenizer_zoo
from tests.workers.tokenizer_zoo import ALL, BYTE_LEVEL, OTHERS, SENTENCES, id_of
from triptych.workers.summarize.detokenizer import MAX_HELD_TOKENS, make_detokenizer
from triptych.workers.summarize.vocabulary import REPLACEMENT, Vocabulary

BYTE_TOKENS = ("llama2", "gemma")


def pieces_of(vocabulary: Vocabulary, token_ids: list[int], *, skip: bool = True) -> list[str]:
    """The results of each push, and of flush."""
    detokenizer = make_detokenizer(vocabulary, skip_special_tokens=skip)
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


def full_decode(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool = True) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=skip)
    return text


def byte_tokens(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    return [id_of(tokenizer, f"<0x{byte:02X}>") for byte in raw]


def has_long_run(tokenizer: Tokenizer, token_ids: list[int]) -> bool:
    """Whether so many byte tokens follow each other that they are decoded in parts."""
    kinds = "".join("B" if (tokenizer.id_to_token(token_id) or "").startswith("<0x") else "." for token_id in token_ids)
    return "B" * MAX_HELD_TOKENS in kinds


def random_ids(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Random ids, some without a token; in one case of three mostly bytes and special tokens. No run is too long."""
    num_tokens = tokenizer.get_vocab_size() + 5
    limit = num_tokens if rng.random() < 0.66 else min(270, num_tokens)
    return [rng.randrange(limit) for _ in range(rng.randrange(MAX_HELD_TOKENS))]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("skip", [True, False], ids=["skip special", "keep special"])
def test_random_ids_are_decoded_as_in_one_call(name: str, skip: bool) -> None:
    tokenizer, rng = ALL[name](), random.Random(name)
    vocabulary = Vocabulary(tokenizer)
    for _ in range(3000 if name in BYTE_LEVEL else 1500):
        token_ids = random_ids(rng, tokenizer)
        assert "".join(pieces_of(vocabulary, token_ids, skip=skip)) == full_decode(tokenizer, token_ids, skip=skip)


@pytest.mark.parametrize("name", ALL)
def test_many_random_ids_differ_only_by_long_runs_of_bytes(name: str) -> None:
    tokenizer, rng = ALL[name](), random.Random(name)
    vocabulary = Vocabulary(tokenizer)
    for _ in range(200):
        token_ids = [token_id for _ in range(12) for token_id in random_ids(rng, tokenizer)]
        text = "".join(pieces_of(vocabulary, token_ids, skip=False))
        assert text == full_decode(tokenizer, token_ids, skip=False) or has_long_run(tokenizer, token_ids)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("sentence", SENTENCES, ids=ascii)
def test_sentence_cut_after_any_token_is_decoded_as_in_one_call(name: str, sentence: str) -> None:
    tokenizer = ALL[name]()
    vocabulary, token_ids = Vocabulary(tokenizer), tokenizer.encode(sentence).ids
    for num_tokens in range(len(token_ids) + 1):
        text = "".join(pieces_of(vocabulary, token_ids[:num_tokens]))
        assert text == full_decode(tokenizer, token_ids[:num_tokens]) or has_long_run(tokenizer, token_ids)
        assert text.rstrip(REPLACEMENT) in full_decode(tokenizer, token_ids)


@pytest.mark.parametrize("sentence", SENTENCES, ids=ascii)
def test_text_cut_after_any_byte_ends_in_at_most_one_replacement_character(sentence: str) -> None:
    vocabulary, raw = Vocabulary(tokenizer_zoo.byte_level()), sentence.encode()
    names: dict[int, str] = bytes_to_unicode()
    ids = [id_of(vocabulary.tokenizer, names[byte]) for byte in raw]
    for num_bytes in range(len(raw) + 1):
        assert "".join(pieces_of(vocabulary, ids[:num_bytes])) == raw[:num_bytes].decode("utf-8", "replace")


@pytest.mark.parametrize("name", ALL)
def test_text_equals_that_of_transformers(name: str) -> None:
    tokenizer = ALL[name]()
    theirs: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    for sentence in SENTENCES:
        ids = [0, *tokenizer.encode(sentence).ids, 1]
        text = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "".join(pieces_of(Vocabulary(tokenizer), ids)) == text


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_byte_level_text_is_held_back_only_inside_a_character(name: str) -> None:
    tokenizer = BYTE_LEVEL[name]()
    ids = tokenizer.encode("".join(SENTENCES)).ids
    shown = ""
    for count, piece in enumerate(pieces_of(Vocabulary(tokenizer), ids)[:-1], start=1):
        shown += piece
        assert shown == full_decode(tokenizer, ids[:count]).rstrip(REPLACEMENT)


@pytest.mark.parametrize("name", BYTE_TOKENS)
def test_script_without_tokens_of_its_own_still_streams(name: str) -> None:
    tokenizer, script = OTHERS[name](), "ཀ་ཁ་ག་" * 30
    pieces = pieces_of(Vocabulary(tokenizer), byte_tokens(tokenizer, script.encode()))
    assert "".join(pieces) == script
    quiet = max(len(gap) for gap in "".join("." if piece == "" else "#" for piece in pieces).split("#"))
    assert quiet < MAX_HELD_TOKENS


@pytest.mark.parametrize("name", BYTE_TOKENS)
@pytest.mark.parametrize("raw", [b"\xff", b"\xe2", b"a\xe2\x82", b"\xc3\xa9\xff"], ids=repr)
def test_bytes_that_never_form_a_character_are_not_held_back_for_ever(name: str, raw: bytes) -> None:
    tokenizer = OTHERS[name]()
    detokenizer = make_detokenizer(Vocabulary(tokenizer))
    for count, token_id in enumerate(byte_tokens(tokenizer, raw * 100), start=1):
        detokenizer.push(token_id)
        assert count < MAX_HELD_TOKENS or len(getattr(detokenizer, "_unsettled")) < MAX_HELD_TOKENS  # noqa: B009
    assert detokenizer.push(id_of(tokenizer, "a")).endswith("a")


@pytest.mark.parametrize("name", BYTE_TOKENS)
def test_each_byte_of_a_short_invalid_run_is_one_replacement_character(name: str) -> None:
    tokenizer = OTHERS[name]()
    ids = [*byte_tokens(tokenizer, "é".encode() + b"\xff"), id_of(tokenizer, "a")]
    assert pieces_of(Vocabulary(tokenizer), ids) == ["", "", "", REPLACEMENT * 3 + "a", ""]


CONTINUED = {"llama2": " the lazy", "gemma": " the lazy", "metaspace": " the lazy", "word_piece": " the lazy"}


@pytest.mark.parametrize("name", CONTINUED)
def test_text_continues_its_context(name: str) -> None:
    tokenizer = OTHERS[name]()
    context, ids = tokenizer.encode("over").ids, tokenizer.encode("the lazy").ids
    detokenizer = make_detokenizer(Vocabulary(tokenizer), context=context)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == CONTINUED[name]


def test_ids_without_a_token_are_silent() -> None:
    for make in ALL.values():
        assert "".join(pieces_of(Vocabulary(make()), [-1, 10**6, 2**31 - 1])) == ""


def test_decoder_that_rewrites_its_text_loses_none_of_it() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "": 2}))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "X")])
    assert "".join(pieces_of(Vocabulary(tokenizer), [0, 1, 0])) == "aba"  # in one call it would be "Xa"
