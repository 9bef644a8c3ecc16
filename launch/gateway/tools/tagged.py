"""Calls with a tag around each argument instead of JSON: Qwen3-Coder, Qwen 3.5 and Seed-OSS, those of GLM-4.5, and
those of MiniMax-M2.

``<tool_call><function=NAME><parameter=KEY>\\nVALUE\\n</parameter>...</function></tool_call>``,
``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>``, and
``<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>...</minimax:tool_call>``.
Text stands as it is, and other values as JSON: the tool's schema tells which it is.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from .hermes import HermesParser
from .parser import Call, Found, Schemas, arguments_text, held_back, visible
from .values import value_of

_TAIL_CHARS = 512  # in front of an end tag, where it is told from one in an argument
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_BARE_TAIL = re.compile(r"(?:</parameter>|\A<function=[^>\n]+>)\s*\Z")
_NAME = r"[\w.:-]{1,128}"
_NAME_FIRST = re.compile(rf"\s*{_NAME}\s*")
_HEAD = re.compile(rf"\s*<function=({_NAME})>")
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|(?:</function>\s*)?\Z))", re.DOTALL
)
_INVOKE, _INVOKE_END = re.compile(r'\s*<invoke name="([^"\n]+)">'), re.compile(r"\s*</invoke>")
_BEHIND_NAMED = r'<parameter name="|</invoke>\s*(?:<invoke name="|(?:<[a-z ]*)?\Z)'
_NAMED_PARAMETER = re.compile(rf'\s*<parameter name="([^"\n]+)">(.*?)</parameter>(?=\s*(?:{_BEHIND_NAMED}))', re.DOTALL)
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL)


class _TailFinder:
    """Finds the first end tag behind what ends a call; others may be part of an argument."""

    def __init__(self, tag: str, tail: re.Pattern[str]) -> None:
        self.hidden: int | None = None  # where the first of the others begins
        self._tag, self._tail = tag, tail
        self._num_read = 0

    def find(self, text: str) -> int | None:
        while (place := text.find(self._tag, self._num_read)) >= 0:
            self._num_read = place + len(self._tag)
            if self._tail.search(text[max(0, place - _TAIL_CHARS) : place]):
                return place
            self.hidden = place if self.hidden is None else self.hidden
        self._num_read = max(self._num_read, len(text) - len(self._tag) + 1)
        return None


class TaggedParser(HermesParser):
    tail: re.Pattern[str]  # what ends a call

    def __init__(self, tools: Schemas | None = None) -> None:
        """``tools``: the schemas of their arguments, if they are known."""
        super().__init__()
        self._tools = tools or {}

    def make_finder(self) -> _TailFinder:
        return _TailFinder(self.end, self.tail)

    def _call(self, name: str, pairs: dict[str, str]) -> Call:
        schema = self._tools.get(name, {})
        return Call(name, arguments_text({key: value_of(value, schema, key) for key, value in pairs.items()}))


class _OneCallParser(TaggedParser, ABC):
    """One call between the tags."""

    def call_in(self, text: str) -> Call | None:
        found = self._read(text)
        return None if found is None else self._call(*found)

    @abstractmethod
    def _read(self, text: str) -> tuple[str, dict[str, str]] | None:
        """The name and the arguments of the call; None if it is none."""


class QwenCoderParser(_OneCallParser):
    """Qwen3-Coder often leaves out the first tag, so that the name comes at once; then the last may be missing too."""

    padding = "\n"  # around each value
    tail = re.compile(r"(?:</parameter>\s*(?:</function>)?|<function=[^>\n]+>\s*</function>)\s*\Z")

    def __init__(self, tools: Schemas | None = None) -> None:
        super().__init__(tools)
        self._is_behind_bare = False  # a call without the first tag

    @classmethod
    def begins(cls, text: str) -> bool | None:
        begun = text.lstrip()
        return begun.startswith(_FUNCTION) or (None if _FUNCTION.startswith(begun) else False)

    def call_in(self, text: str) -> Call | None:
        call = super().call_in(text)
        is_bare = self._tags[0] != self.start  # then only the name of a tool tells a call from a text about calls
        return None if call is not None and is_bare and self._tools and call.name not in self._tools else call

    def _open(self) -> str | None:
        if self._is_behind_bare:
            begun = self._text.lstrip()
            if self.end.startswith(begun):
                return None
            self._is_behind_bare = False
            self._text = begun.removeprefix(self.end) if begun.startswith(self.end) else self._text
        place, usual = self._text.find(_FUNCTION), self._text.find(self.start)
        if place < 0 or 0 <= usual < place:
            return super()._open()
        before, self._text = self._text[:place], self._text[place:]
        self._finder, self._tags = _TailFinder(_FUNCTION_END, _BARE_TAIL), ("", _FUNCTION_END)
        self._is_behind_bare = True
        return before

    def _num_held(self) -> int:
        return len(self._text) if self._is_behind_bare else max(super()._num_held(), held_back(self._text, _FUNCTION))

    def last_calls_in(self, text: str) -> Found:
        return self.calls_in(text) if text.rstrip().endswith(_FUNCTION_END) else []

    def _read(self, text: str) -> tuple[str, dict[str, str]] | None:
        if (head := _HEAD.match(text)) is None:
            return None
        pairs, place = _pairs(_PARAMETER, text, head.end())
        pairs = {key: value.removeprefix(self.padding).removesuffix(self.padding) for key, value in pairs.items()}
        is_call = text[place:].strip() in ("", _FUNCTION_END)  # which some calls lack
        return (head[1], pairs) if is_call else None


class SeedParser(QwenCoderParser):
    start, end, padding = "<seed:tool_call>", "</seed:tool_call>", ""


class GlmParser(_OneCallParser):
    tail = re.compile(rf"</arg_value>\s*\Z|\A\s*{_NAME}\s*\Z")

    @classmethod
    def begins(cls, text: str) -> bool | None:
        if (head := _NAME_FIRST.match(text)) is None:
            return False if text.strip() else None
        rest, marks = text[head.end() :], ("<arg_key>", cls.end)
        return rest.startswith(marks) or (None if any(mark.startswith(rest) for mark in marks) else False)

    def last_calls_in(self, text: str) -> Found:
        return []  # more arguments might have followed

    def _read(self, text: str) -> tuple[str, dict[str, str]] | None:
        name = text.partition("<")[0]
        pairs, place = _pairs(_PAIR, text, len(name))
        is_call = re.fullmatch(_NAME, name.strip()) and not text[place:].strip()
        return (name.strip(), pairs) if is_call else None


class MiniMaxParser(TaggedParser):
    """Several calls between the tags."""

    start, end = "<minimax:tool_call>", "</minimax:tool_call>"
    tail = re.compile(r'(?:</parameter>|<invoke name="[^"\n]+">)\s*</invoke>\s*\Z')

    @classmethod
    def begins(cls, text: str) -> bool | None:
        begun, head = text.lstrip(), "<invoke name="
        return begun.startswith(head) or (None if head.startswith(begun) else False)

    def calls_in(self, text: str) -> Found:
        calls, rest = self._calls_before(text)
        return [] if rest.strip() else calls

    def last_calls_in(self, text: str) -> Found:
        calls, rest = self._calls_before(text)
        return [*calls, *visible(rest)] if calls else []

    def _calls_before(self, text: str) -> tuple[Found, str]:
        """The complete calls at the beginning, and the text behind them."""
        calls: Found = []
        place = 0
        while (head := _INVOKE.match(text, place)) is not None:
            pairs, behind = _pairs(_NAMED_PARAMETER, text, head.end())
            if (end := _INVOKE_END.match(text, behind)) is None:
                break
            calls.append(self._call(head[1], pairs))
            place = end.end()
        return calls, text[place:]


TAGGED: dict[str, type[GlmParser | MiniMaxParser | QwenCoderParser]] = {
    "glm45": GlmParser,
    "minimax": MiniMaxParser,
    "qwen3_coder": QwenCoderParser,
    "qwen3": QwenCoderParser,  # in ids
    "seed_oss": SeedParser,
}


def _pairs(pattern: re.Pattern[str], text: str, place: int) -> tuple[dict[str, str], int]:
    """Arguments by their names, and where they end."""
    pairs: dict[str, str] = {}
    while (found := pattern.match(text, place)) is not None:
        pairs[found[1].strip()] = found[2]
        place = found.end()
    return pairs, place
