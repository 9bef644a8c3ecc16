"""What each token id stands for: its bytes, or its text and how it behaves among its neighbours."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from ...protocol.byte_level import BYTE_OF
from ...protocol.tokenizer_files import load_facts, load_tokenizer_json

REPLACEMENT = "\ufffd"  # stands for bytes that are not UTF-8
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """One tokenizer, for decoding. Its tables are filled on demand, so that loading costs nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        decoders = _decoder_names(tokenizer)
        # Fuse only joins what ByteLevel has already joined.
        self.is_byte_level = decoders[:1] == ["ByteLevel"] and set(decoders[1:]) <= {"Fuse"}
        self.has_byte_tokens = "ByteFallback" in decoders
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # By whether special tokens are skipped.
        self._bytes = {skip: ByteTable(self, skip) for skip in (False, True)}
        self._pieces = {skip: PieceTable(self, skip) for skip in (False, True)}

    @classmethod
    def load(cls, folder: Path) -> Vocabulary | None:
        """The vocabulary of the tokenizer in the run directory; None until execute has written it."""
        return None if load_facts(folder) is None else cls(Tokenizer.from_str(load_tokenizer_json(folder)))

    @property
    def amid_text(self) -> tuple[int, ...]:
        """The context of a text that has already started, see ``make_detokenizer``."""
        filler = None if self.is_byte_level else self._pieces[True].filler
        return () if filler is None else (filler,)

    def byte_table(self, *, skip_special_tokens: bool) -> ByteTable:
        assert self.is_byte_level, "only a byte-level token is a fixed string of bytes"
        return self._bytes[skip_special_tokens]

    def piece_table(self, *, skip_special_tokens: bool) -> PieceTable:
        return self._pieces[skip_special_tokens]

    def token_bytes(self, token_id: int) -> bytes:
        """The token alone as bytes of UTF-8, possibly starting or ending inside a character; special tokens by name.

        Joined over an answer's tokens they are its text (except for a space that a SentencePiece decoder drops from the
        start). Empty for an id without a token.
        """
        if self.is_byte_level:
            return self._bytes[False][token_id]
        token = self.token(token_id)
        if token is None:
            return b""
        if self.has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return self.text_after(self._pieces[False].filler, [token_id]).encode()

    def text_after(self, anchor: int | None, token_ids: list[int]) -> str:
        """The text of tokens after another token, or at the start of a text. Special tokens are included."""
        if anchor is None:
            return self._decode(token_ids)
        before = self._pieces[False][anchor].text
        text = self._decode([anchor, *token_ids])
        # A decoder may rewrite its earlier output; what was sent cannot be changed, so the tokens are decoded alone.
        return text[len(before) :] if text.startswith(before) else self._decode(token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def token(self, token_id: int) -> str | None:
        """The token as written in the vocabulary; None if the model's vocabulary is larger than the tokenizer's."""
        token: str | None = self.tokenizer.id_to_token(token_id) if token_id >= 0 else None
        return token


class ByteTable(dict[int, bytes]):
    """token id -> its bytes, for byte-level tokenizers; empty for tokens that are not shown."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._hidden = vocabulary.special_ids if skip_special_tokens else frozenset()

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._hidden else self._vocabulary.token(token_id)
        self[token_id] = found = b"" if token is None else _byte_level_bytes(token)
        return found


class Piece(NamedTuple):
    """How a token that is not byte-level behaves when decoded."""

    text: str  # of the token alone
    is_shown: bool
    is_byte: bool  # one byte of a character; its text depends on the bytes around it

    @property
    def is_whole(self) -> bool:
        """Whether it has text of its own, so that what follows is neither at the start nor inside a character."""
        return self.text != "" and not self.is_byte and not self.text.endswith(REPLACEMENT)


class PieceTable(dict[int, Piece]):
    """token id -> its piece, for tokenizers that are not byte-level."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._hidden = vocabulary.special_ids if skip_special_tokens else frozenset()

    def __missing__(self, token_id: int) -> Piece:
        self[token_id] = piece = self._piece(token_id)
        return piece

    def _piece(self, token_id: int) -> Piece:
        token = None if token_id in self._hidden else self._vocabulary.token(token_id)
        if token is None:
            return Piece("", is_shown=False, is_byte=False)
        is_byte = self._vocabulary.has_byte_tokens and _BYTE_TOKEN.fullmatch(token) is not None
        text = self._vocabulary.tokenizer.decode([token_id], skip_special_tokens=False)
        return Piece(text, is_shown=True, is_byte=is_byte)

    @cached_property
    def filler(self) -> int | None:
        """A whole token to put in front of others, so that they are not decoded as the start of a text."""
        return self.first_whole(range(self._vocabulary.tokenizer.get_vocab_size(with_added_tokens=True)))

    def first_whole(self, token_ids: Iterable[int]) -> int | None:
        return next((token_id for token_id in token_ids if self[token_id].is_whole), None)


def _decoder_names(tokenizer: Tokenizer) -> list[str]:
    """The types of the tokenizer's decoders in the order in which they run, with sequences flattened."""
    if tokenizer.decoder is None:
        return []
    return list(_flat_names(json.loads(tokenizer.decoder.__getstate__())))


def _flat_names(decoder: dict[str, Any]) -> Iterator[str]:
    if decoder["type"] != "Sequence":
        yield decoder["type"]
        return
    for child in decoder["decoders"]:
        yield from _flat_names(child)


def _byte_level_bytes(token: str) -> bytes:
    # A token with a character outside the alphabet is an added token, which stands for itself.
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
