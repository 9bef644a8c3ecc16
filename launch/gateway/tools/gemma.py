"""``call:NAME{key:<escape>text<escape>,days:3}``: FunctionGemma's, between marks; a token stands around texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from .parser import Call, arguments_text, held_back

QUOTE = "<escape>"
_MARKS = re.compile(f"{QUOTE}|[{{}}]")
_KEY = re.compile(r"([{,]\s*)([\w.-]+)\s*:")


class GemmaScanner:
    """Finds the braces that end calls."""

    def __init__(self) -> None:
        self.depth = 0
        self._in_text = False
        self._tail = ""  # a part of the quote

    def ends(self, text: str) -> Iterator[int]:
        num_before, text = len(self._tail), self._tail + text
        self._tail = text[len(text) - held_back(text, QUOTE) :]
        for mark in _MARKS.finditer(text):
            match mark[0]:
                case "{" if not self._in_text:
                    self.depth += 1
                case "}" if not self._in_text:
                    self.depth -= 1
                    if self.depth <= 0:
                        yield mark.end() - num_before
                case mark_of_text if mark_of_text == QUOTE and self.depth > 0:
                    self._in_text = not self._in_text


def gemma_call(text: str) -> Call | None:
    """
    Raises:
        ValueError, RecursionError: it cannot be read.
    """
    head, brace, arguments = text.partition("{")
    name = head.strip().removeprefix("call:").strip()
    if re.fullmatch(r"[\w.-]{1,128}", name) is None:
        return None
    parts = (brace + arguments).split(QUOTE)
    pairs = (json.dumps(part) if index % 2 else _KEY.sub(r'\1"\2":', part) for index, part in enumerate(parts))
    return Call(name, arguments_text(json.loads("".join(pairs))))
