"""Which tokens of an answer are of its content, and none of its thoughts or of the marks around them."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

from .words import Words


class Spans:
    """Where in an answer its content is, in characters. They are added in order, and asked for in order."""

    def __init__(self) -> None:
        self._spans: deque[list[int]] = deque()

    def add(self, begin: int, end: int) -> None:
        if self._spans and self._spans[-1][1] == begin:
            self._spans[-1][1] = end
        elif end > begin:
            self._spans.append([begin, end])

    def meets(self, begin: int, end: int) -> bool:
        """Whether some of these characters are content; nobody asks for earlier ones afterwards."""
        while len(self._spans) > 1 and self._spans[0][1] <= begin:
            self._spans.popleft()
        return any(span[0] < end and begin < span[1] for span in self._spans)


class Reader(Protocol):
    """What divides the text of an answer, piece by piece."""

    content: Spans

    @property
    def num_known(self) -> int:
        """Characters from the beginning of which it is known what they are."""
        ...

    def push(self, text: str) -> tuple[str, str]: ...

    def flush(self) -> tuple[str, str]: ...


class ContentTokens:
    """Picks from what there is of an answer's tokens, an entry a token, that of its content.

    A token of which one character is content is of it; one that begins in the middle of a character goes with that.
    """

    def __init__(self, words: Words, reader: Reader | None) -> None:
        """Without a ``reader`` all of the answer is content."""
        self._words, self._reader = words, reader
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0
        self._waiting: deque[tuple[int, int, Any]] = deque()  # begin and end of a token of which it is not known yet

    def push(self, token_ids: Iterable[int], entries: Iterable[Any]) -> list[Any]:
        """More of the answer; the entries that are now known to be of its content."""
        if self._reader is None:
            return list(entries)
        for token_id, entry in zip(token_ids, entries, strict=True):
            text, begin = self._decoder.decode(self._words.bytes_of(token_id)), self._num_chars
            self._num_chars += len(text)
            self._waiting.append((begin, max(self._num_chars, begin + 1), entry))
            self._reader.push(text)
        return self._known(self._reader)

    def flush(self) -> list[Any]:
        """What is left when the answer has ended."""
        if self._reader is None:
            return []
        self._reader.push(self._decoder.decode(b"", final=True))
        self._reader.flush()
        found = self._known(self._reader)
        self._waiting.clear()
        return found

    def _known(self, reader: Reader) -> list[Any]:
        found = []
        while self._waiting and self._waiting[0][1] <= reader.num_known:
            begin, end, entry = self._waiting.popleft()
            if reader.content.meets(begin, end):
                found.append(entry)
        return found
