"""Token ids to text, one at a time: every piece returned is final.

The full text of an answer is what the tokenizer decodes from all its ids at once. ``push`` returns what no later token
can change, ``flush`` the rest, and joined they are the full text, for any ids (with one exception, described at
``WindowDetokenizer``). At most three bytes (byte-level tokenizers) or ``MAX_HELD_TOKENS`` tokens are held back.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from .vocabulary import REPLACEMENT, ByteTable, Vocabulary

MAX_HELD_TOKENS = 16
_MAX_OPEN_BYTES = 3  # of an incomplete UTF-8 character


class Detokenizer(Protocol):
    """The text of one token stream."""

    def push(self, token_id: int) -> str:
        """The text that became final with this token; possibly of earlier tokens, often none."""
        ...

    def flush(self) -> str:
        """What was held back, now that no token follows; incomplete characters as U+FFFD."""
        ...


def make_detokenizer(
    vocabulary: Vocabulary, *, skip_special_tokens: bool = True, context: Sequence[int] = ()
) -> Detokenizer:
    """A detokenizer for one token stream.

    ``context`` holds the tokens before the stream, if the text continues theirs: SentencePiece decoders drop the space
    before the first word of a text, WordPiece decoders write one before every other word. Byte-level decoders do not
    depend on it.
    """
    if vocabulary.is_byte_level:
        return ByteLevelDetokenizer(vocabulary.byte_table(skip_special_tokens=skip_special_tokens))
    return WindowDetokenizer(vocabulary, skip_special_tokens=skip_special_tokens, context=context)


class ByteLevelDetokenizer:
    """For byte-level tokenizers: tokens are byte strings, and the text is their concatenation as UTF-8."""

    __slots__ = ("_open", "_table")

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._open = b""  # the first bytes of an incomplete character

    def push(self, token_id: int) -> str:
        pending = self._open + self._table[token_id]
        text, num_used = utf_8_decode(pending, "replace", False)
        self._open = pending[num_used:]
        return text

    def flush(self) -> str:
        text, self._open = self._open.decode("utf-8", "replace"), b""
        return text


class WindowDetokenizer:
    """For all other tokenizers: decodes a window of one settled token, the anchor, and all unsettled tokens.

    The new text is whatever the window's text has beyond the anchor's. The anchor only tells the decoder that this is
    not the start of the text. Byte tokens (``<0xE2>``) stay unsettled until a token of another kind follows: if a run
    of them turns out not to be UTF-8, each becomes U+FFFD, including those of its complete characters. A run of
    ``MAX_HELD_TOKENS`` is settled in parts, so that scripts without tokens of their own can stream: this is the
    exception, as complete characters are then kept whatever follows.
    """

    __slots__ = ("_anchor", "_pieces", "_unsettled", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool, context: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._pieces = vocabulary.piece_table(skip_special_tokens=skip_special_tokens)
        self._anchor = self._pieces.first_whole(reversed(context))  # None: at the start of the text
        self._unsettled: list[int] = []

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if not piece.is_shown:
            return ""
        self._unsettled.append(token_id)
        is_full = len(self._unsettled) >= MAX_HELD_TOKENS
        if piece.is_byte:
            return self._settle_characters() if is_full else ""
        text = self._vocabulary.text_after(self._anchor, self._unsettled)
        if text.endswith(REPLACEMENT) and not is_full:
            return ""
        self._settle(len(self._unsettled), token_id if piece.is_whole else self._anchor)
        return text

    def flush(self) -> str:
        text = self._vocabulary.text_after(self._anchor, self._unsettled) if self._unsettled else ""
        self._unsettled.clear()
        return text

    def _settle_characters(self) -> str:
        """Settle the complete characters of a run of bytes, or the whole run if it is not UTF-8."""
        num_tokens = len(self._unsettled)
        for num_open in (0, 1, 2, _MAX_OPEN_BYTES):
            text = self._vocabulary.text_after(self._anchor, self._unsettled[: num_tokens - num_open])
            if not text.endswith(REPLACEMENT):
                self._settle(num_tokens - num_open, self._anchor)
                return text
        text = self._vocabulary.text_after(self._anchor, self._unsettled)
        self._settle(num_tokens, self._anchor)
        return text

    def _settle(self, num_tokens: int, anchor: int | None) -> None:
        del self._unsettled[:num_tokens]
        self._anchor = self._pieces.filler if anchor is None else anchor
