"""Calls with a tag around each argument instead of JSON: Qwen3-Coder, Qwen 3.5 and Seed-OSS, and those of GLM-4.5.

``<tool_call><function=NAME><parameter=KEY>\\nVALUE\\n</parameter>...</function></tool_call>``, and
``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>``. Text stands as it is, other values
as JSON: which it is tells the tool's schema.
"""

from __future__ import annotations

import re
from abc import abstractmethod

from .hermes import HermesParser
from .parser import Call, Schemas, arguments_text
from .values import value_of

_TAIL_CHARS = 512  # in front of an end tag, where it is told from one in an argument
_FUNCTION_END = "</function>"
_NAME = r"[\w.:-]{1,128}"
_HEAD = re.compile(rf"\s*<function=({_NAME})>")
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|(?:</function>\s*)?\Z))", re.DOTALL
)
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

    def call_in(self, text: str) -> Call | None:
        if (found := self._read(text)) is None:
            return None
        name, pairs = found
        schema = self._tools.get(name, {})
        return Call(name, arguments_text({key: value_of(value, schema, key) for key, value in pairs.items()}))

    @abstractmethod
    def _read(self, text: str) -> tuple[str, dict[str, str]] | None:
        """The name and the arguments of the call; None if it is none."""


class QwenCoderParser(TaggedParser):
    padding = "\n"  # around each value
    tail = re.compile(r"(?:</parameter>\s*(?:</function>)?|<function=[^>\n]+>\s*</function>)\s*\Z")

    def last_call_in(self, text: str) -> Call | None:
        return self.call_in(text) if text.rstrip().endswith(_FUNCTION_END) else None

    def _read(self, text: str) -> tuple[str, dict[str, str]] | None:
        if (head := _HEAD.match(text)) is None:
            return None
        pairs, place = _pairs(_PARAMETER, text, head.end())
        pairs = {key: value.removeprefix(self.padding).removesuffix(self.padding) for key, value in pairs.items()}
        is_call = text[place:].strip() in ("", _FUNCTION_END)  # which some calls lack
        return (head[1], pairs) if is_call else None


class SeedParser(QwenCoderParser):
    start, end, padding = "<seed:tool_call>", "</seed:tool_call>", ""


class GlmParser(TaggedParser):
    tail = re.compile(rf"</arg_value>\s*\Z|\A\s*{_NAME}\s*\Z")

    def last_call_in(self, text: str) -> Call | None:
        return None  # more arguments might have followed

    def _read(self, text: str) -> tuple[str, dict[str, str]] | None:
        name = text.partition("<")[0]
        pairs, place = _pairs(_PAIR, text, len(name))
        is_call = re.fullmatch(_NAME, name.strip()) and not text[place:].strip()
        return (name.strip(), pairs) if is_call else None


TAGGED: dict[str, type[GlmParser | QwenCoderParser]] = {
    "glm45": GlmParser, "qwen3_coder": QwenCoderParser, "seed_oss": SeedParser,
}  # fmt: skip


def _pairs(pattern: re.Pattern[str], text: str, place: int) -> tuple[dict[str, str], int]:
    """Arguments by their names, and where they end."""
    pairs: dict[str, str] = {}
    while (found := pattern.match(text, place)) is not None:
        pairs[found[1].strip()] = found[2]
        place = found.end()
    return pairs, place
