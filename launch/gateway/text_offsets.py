"""Where in a text each of its tokens begins, in characters.

A token that goes on with a character that another one began, begins where that character does. One that is not in the
text, such as a special token that was left out, begins where the text goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .words import Words

_CONTINUES = 0b10 << 6  # the two high bits of a byte that goes on with a character of UTF-8


class TextOffsets:
    """Offsets of an answer's tokens as they come."""

    def __init__(self, words: Words, *, start: int = 0, skip_special_tokens: bool = True) -> None:
        """``start``: characters of text before the first token."""
        self._words = words
        self._num_chars = start
        self._skips = skip_special_tokens

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Those of the next tokens."""
        return [self._next(token_id) for token_id in token_ids]

    def _next(self, token_id: int) -> int:
        content = self._words.bytes_of(token_id)
        if self._skips and self._words.is_special(token_id):
            content = b""
        offset = self._num_chars - _is_within(content, 0)
        self._num_chars += sum(not _is_within(content, at) for at in range(len(content)))
        return offset


def prompt_offsets(words: Words, text: str, token_ids: Sequence[int]) -> list[int]:
    """Those of a prompt's tokens in the text that it was given as."""
    content, at, num_chars = text.encode(errors="replace"), 0, 0
    offsets: list[int] = []
    for token_id in token_ids:
        token = words.bytes_of(token_id)
        if not content.startswith(token, at):
            token = token.removeprefix(b" ")  # which a tokenizer puts in front of the text
        if not content.startswith(token, at):
            token = b""
        offsets.append(num_chars - _is_within(content, at))
        num_chars += sum(not _is_within(token, i) for i in range(len(token)))
        at += len(token)
    return offsets


def _is_within(content: bytes, at: int) -> bool:
    """Whether a character that began earlier goes on here."""
    return at < len(content) and content[at] & 0b11 << 6 == _CONTINUES
