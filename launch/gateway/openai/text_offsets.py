"""Where each token of a text begins, in characters.

A token that continues a character of an earlier one begins where that character does. A token that is not in the text,
such as a skipped special token, begins where the text continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..requests.words import Words

_CONTINUES = 0b10 << 6  # the two high bits of a UTF-8 continuation byte


class TextOffsets:
    """Offsets of an answer's tokens, as they arrive."""

    def __init__(self, words: Words, *, start: int = 0, skip_special_tokens: bool = True) -> None:
        """``start``: characters of text before the first token."""
        self._words = words
        self._num_chars = start
        self._skips = skip_special_tokens

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """The offsets of the next tokens."""
        return [self._next(token_id) for token_id in token_ids]

    def _next(self, token_id: int) -> int:
        content = self._words.bytes_of(token_id)
        if self._skips and self._words.is_special(token_id):
            content = b""
        offset = self._num_chars - _is_within(content, 0)
        self._num_chars += _num_begun(content)
        return offset


def prompt_offsets(words: Words, text: str, token_ids: Sequence[int]) -> list[int]:
    """The offsets of a prompt's tokens in its text, whose beginning may have been truncated."""
    content, tokens = text.encode(errors="replace"), [words.bytes_of(token_id) for token_id in token_ids]
    kept = b"".join(tokens)
    at = len(content) - len(kept) if content.endswith(kept) else 0
    num_chars = _num_begun(content[:at])
    offsets: list[int] = []
    for token in tokens:
        if not content.startswith(token, at):
            token = token.removeprefix(b" ")  # added by the tokenizer in front of the text
        if not content.startswith(token, at):
            token = b""
        offsets.append(num_chars - _is_within(content, at))
        num_chars += _num_begun(token)
        at += len(token)
    return offsets


def _num_begun(content: bytes) -> int:
    """The number of characters that begin in it."""
    return sum(not _is_within(content, at) for at in range(len(content)))


def _is_within(content: bytes, at: int) -> bool:
    """Whether this byte continues a character that began earlier."""
    return at < len(content) and content[at] & 0b11 << 6 == _CONTINUES
