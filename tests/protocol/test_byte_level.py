"""The byte-level alphabet is that of the tokenizers library."""

from __future__ import annotations

from tokenizers import pre_tokenizers

from triptych.protocol.byte_level import BYTE_OF


def test_each_byte_has_one_character() -> None:
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())


def test_text_is_spelled_as_in_the_library() -> None:
    text = "Hé \n\t€\u00ad"
    [(spelled, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert bytes(BYTE_OF[character] for character in spelled) == text.encode()
