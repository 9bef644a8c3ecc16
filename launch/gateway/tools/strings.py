"""Tells the marks of a format from the same text within strings of JSON."""

from __future__ import annotations

import re

from .parser import held_back


class MarkFinder:
    """Finds the first mark outside of strings, in a text that is read once while it grows."""

    def __init__(self, *marks: str) -> None:
        self.hidden: int | None = None  # where the first mark within a string begins
        self._marks = marks
        self._pattern = re.compile("|".join((r"\\.", '"', *map(re.escape, marks))), re.DOTALL)
        self._num_read = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """Where that mark begins in ``text``, which begins with the text of the previous call."""
        for found in self._pattern.finditer(text, self._num_read):
            self._num_read = found.end()
            if found[0] == '"':
                self._in_string = not self._in_string
            elif found[0] in self._marks and not self._in_string:
                return found.start()
            elif found[0] in self._marks and self.hidden is None:
                self.hidden = found.start()
        # Half of a mark or of an escaped character is read again with the other half.
        half = max(text.endswith("\\"), *(held_back(text, mark) for mark in self._marks))
        self._num_read = max(self._num_read, len(text) - half)
        return None
