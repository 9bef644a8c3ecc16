"""Which tokens of an answer belong to its content, and not to its reasoning or the marks around it."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Any

from ..requests.words import Words


class Spans:
    """The character ranges of an answer's content. They are added, and queried, in order."""

    def __init__(self) -> None:
        self._spans: deque[list[int]] = deque()

    def add(self, begin: int, end: int) -> None:
        if self._spans and self._spans[-1][1] == begin:
            self._spans[-1][1] = end
        elif end > begin:
            self._spans.append([begin, end])

    def meets(self, begin: int, end: int) -> bool:
        """Whether any of these characters are content. Later queries must not go back."""
        while len(self._spans) > 1 and self._spans[0][1] <= begin:
            self._spans.popleft()
        return any(span[0] < end and begin < span[1] for span in self._spans)


class Reader(ABC):
    """Divides the text of an answer into its reasoning and its content, piece by piece."""

    def __init__(self) -> None:
        self._text = ""  # received but not returned yet
        self._num_chars = 0  # received
        self.content = Spans()

    @property
    def num_known(self) -> int:
        """How many characters from the beginning are classified."""
        return self._num_chars - len(self._text)

    @property
    def is_holding(self) -> bool:
        """Whether it holds back text that may yet become a mark."""
        return bool(self._text)

    @abstractmethod
    def push(self, text: str) -> tuple[str, str]:
        """Take more text; returns what it adds to the reasoning, and to the answer."""

    @abstractmethod
    def flush(self) -> tuple[str, str]:
        """The rest, once the answer has ended."""


class ContentTokens:
    """From entries that accompany an answer's tokens, picks those of its content.

    A token with at least one character of content belongs to it; one that starts inside a character belongs with that
    character.
    """

    def __init__(self, words: Words, reader: Reader | None) -> None:
        """Without a ``reader`` the whole answer is content."""
        self._words, self._reader = words, reader
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0
        self._waiting: deque[tuple[int, int, Any]] = deque()  # begin and end of tokens not classified yet

    def push(self, token_ids: Iterable[int], entries: Iterable[Any]) -> list[Any]:
        """Take more of the answer; returns the entries now known to belong to its content."""
        if self._reader is None:
            return list(entries)
        for token_id, entry in zip(token_ids, entries, strict=True):
            text, begin = self._decoder.decode(self._words.bytes_of(token_id)), self._num_chars
            self._num_chars += len(text)
            self._waiting.append((begin, max(self._num_chars, begin + 1), entry))
            self._reader.push(text)
        return self._known(self._reader)

    def flush(self) -> list[Any]:
        """The rest, once the answer has ended."""
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
