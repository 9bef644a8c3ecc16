"""Conversions between token ids and text for what the pipeline does not return: token strings and their bytes."""

from __future__ import annotations

import json
from functools import lru_cache

from tokenizers import Tokenizer

from ....protocol.byte_level import BYTE_OF

CACHED_TOKENS = 1 << 16
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Words:
    """The model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._bytes = lru_cache(CACHED_TOKENS)(self._bytes_of)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def raw(self, token_id: int) -> str:
        """The token as written in the vocabulary."""
        return self._tokenizer.id_to_token(token_id) or ""

    def bytes_of(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, possibly of an incomplete character."""
        return self._bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is not part of the text, such as the end of a turn."""
        return token_id in self._special

    def are_tokens(self, *texts: str) -> bool:
        """Whether each of these texts is encoded as a token of its own."""
        return all(len(self.encode(text, add_special_tokens=False)) == 1 for text in texts)

    def is_special_word(self, text: str) -> bool:
        """Whether this exact text is a special token."""
        token_id = self._tokenizer.token_to_id(text)
        return token_id is not None and self.is_special(token_id)

    def in_grammar(self, text: str) -> str:
        """How a grammar names a mark. Where it is a token of its own, which models write, a string would not match it:
        to grammars, added tokens are not text.
        """
        ids = self.encode(text, add_special_tokens=False)
        return f"<[{ids[0]}]>" if len(ids) == 1 else json.dumps(text)

    def text_of(self, token_id: int) -> str:
        """One token as text; ``\\ufffd`` for an incomplete character."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # a SentencePiece byte token
            return bytes([int(token[3:5], 16)])
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        if REPLACEMENT not in text and text:
            return (" " + text if token.startswith("\u2581") and not text.startswith(" ") else text).encode()
        try:
            return bytes(BYTE_OF[character] for character in token)
        except KeyError:
            return text.encode()
