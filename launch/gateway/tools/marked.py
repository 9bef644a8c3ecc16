"""Calls behind a mark, where the text before them ends: lists of JSON, names in front of JSON, and Python's syntax.

Each entry of ``FORMATS`` is one format. Of those without a mark, calls are the whole answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from .gemma import GemmaScanner, gemma_call
from .objects import BareParser, JsonScanner, Scanner
from .parser import UNREADABLE, Call, Found, arguments_text, call_of, held_back, visible
from .pythonic import PythonicScanner, pythonic_call

MARKER, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"  # Mistral's
SEPARATOR = "<｜tool▁sep｜>"  # DeepSeek's
_MAX_BETWEEN_CHARS = 1024  # longer texts are no part of a call
_CODE = ("```json", "```python", "```")
# A name, and behind it an object: DeepSeek's, and those of Hunyuan, whose arguments are in a block of code.
_HEADED = re.compile(
    rf"(?:function{SEPARATOR})?([\w.:-]{{1,128}})(?:{SEPARATOR})?\s*(?:```(?:json)?)?\s*({{.*)", re.DOTALL
)
_MISTRAL = re.compile(r"([^\[{\s]{1,128})\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*({.*)", re.DOTALL)
_XLAM_HEAD = '[{"name":'  # without white space
_PYTHONIC_HEAD = re.compile(r"\[\s*(?:[A-Za-z_][\w.:-]*\(.*)?|\[\s*[A-Za-z_][\w.:-]*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Format:
    starts: tuple[str, ...] = ()  # marks that may precede the calls
    ends: tuple[str, ...] = ()  # marks that may follow them, or stand between them
    dropped: tuple[str, ...] = ()  # marks around text
    read: Callable[[str], Call | None]  # one call, from the text of it alone
    scanner: Callable[[], Scanner] = JsonScanner
    begins: Callable[[str], bool] | None = None  # without starts: whether an answer may be calls that begins so

    @cached_property
    def between(self) -> re.Pattern[str]:
        """What may stand around calls."""
        return re.compile(rf"(?:{_any_of((*self.starts, *self.ends))}|[\s\[\],;])*")

    @cached_property
    def behind(self) -> re.Pattern[str]:
        """What ends with the mark behind the last call, or with the list."""
        return re.compile(rf"(?:[\s\],;]*(?:{_any_of(self.ends)}))+|\s*\]|")

    @cached_property
    def marks(self) -> re.Pattern[str]:
        return re.compile(_any_of((*self.starts, *self.dropped)))


def _any_of(marks: tuple[str, ...]) -> str:
    return "|".join(map(re.escape, marks)) if marks else r"(?!)"


def _json_call(text: str) -> Call | None:
    return call_of(json.loads(text))


def _headed_call(text: str, head: re.Pattern[str] = _HEADED) -> Call | None:
    found = head.fullmatch(text)
    return Call(found[1], arguments_text(json.loads(found[2]))) if found else None


def _mistral_call(text: str) -> Call | None:
    """Of a list, or ``name[CALL_ID]id[ARGS]{...}``, where later models left out the id."""
    return _json_call(text) if text.startswith("{") else _headed_call(text, _MISTRAL)


def _cohere_call(text: str) -> Call | None:
    value = json.loads(text)
    return call_of({**value, "name": value.get("tool_name")}) if isinstance(value, dict) else None


def _apertus_call(text: str) -> Call | None:
    """``{NAME: {...}}``."""
    value = json.loads(text)
    if not isinstance(value, dict) or len(value) != 1:
        return None
    [(name, arguments)] = value.items()
    return call_of({"name": name, "arguments": arguments})


def _begins_xlam(begun: str) -> bool:
    return _XLAM_HEAD.startswith("".join(begun.split())[: len(_XLAM_HEAD)])


def _begins_pythonic(begun: str) -> bool:
    return not begun or _PYTHONIC_HEAD.fullmatch(begun) is not None


FORMATS = {
    "apertus": Format(starts=("<|tools_prefix|>",), ends=("<|tools_suffix|>",), read=_apertus_call),
    "cohere": Format(  # what it says around calls is its plan
        starts=("<|START_ACTION|>",),
        ends=("<|END_ACTION|>",),
        dropped=("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        read=_cohere_call,
    ),
    "deepseek": Format(
        starts=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        ends=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```"),
        read=_headed_call,
    ),
    "gemma": Format(  # FunctionGemma
        starts=("<start_function_call>",), ends=("<end_function_call>",), read=gemma_call, scanner=GemmaScanner
    ),
    "granite": Format(  # Granite 3, Phi-4-mini
        starts=("<|tool_call|>", "<tool_call>", "functools["),
        ends=("<|/tool_call|>", "</tool_call>"),
        read=_json_call,
    ),
    "hunyuan": Format(
        starts=("<tool_calls>", "<tool_call>"), ends=("</tool_calls>", "</tool_call>", "```"), read=_headed_call
    ),
    "internlm": Format(starts=("<|action_start|><|plugin|>",), ends=("<|action_end|>",), read=_json_call),
    "jamba": Format(starts=("<tool_calls>",), ends=("</tool_calls>",), read=_json_call),  # and Hunyuan-A13B
    "lfm2": Format(  # and MiniCPM3
        starts=("<|tool_call_start|>",),
        ends=("<|tool_call_end|>", *_CODE),
        dropped=("<|thought_start|>", "<|thought_end|>"),
        read=pythonic_call,
        scanner=PythonicScanner,
    ),
    "mistral": Format(starts=(MARKER,), read=_mistral_call),
    "nemotron": Format(starts=("<TOOLCALL>",), ends=("</TOOLCALL>",), read=_json_call),
    "olmo3": Format(
        starts=("<function_calls>",), ends=("</function_calls>",), read=pythonic_call, scanner=PythonicScanner
    ),
    "pythonic": Format(read=pythonic_call, scanner=PythonicScanner, begins=_begins_pythonic),  # Llama 3.2 and 4
    "xlam": Format(read=_json_call, begins=_begins_xlam),
}


class MarkedParser:
    """What precedes the first mark is text; everything after it is calls."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self._text = ""
        self._calls = None if form.starts else _Calls(form)

    def push(self, text: str) -> Found:
        if self._calls is not None:
            return self._calls.push(text)
        self._text += text
        found: Found = []
        place = 0
        for mark in self._form.marks.finditer(self._text):
            found += visible(self._text[place : mark.start()])
            place = mark.end()
            if mark[0] in self._form.starts:
                after, self._text, self._calls = self._text[place:], "", _Calls(self._form, mark[0])
                return [*found, *self._calls.push(after)]
        marks = (*self._form.starts, *self._form.dropped)
        told = len(self._text) - max(held_back(self._text[place:], mark) for mark in marks)
        text, self._text = self._text[place:told], self._text[told:]
        return [*found, *visible(text)]

    @property
    def is_holding(self) -> bool:
        return bool(self._text) if self._calls is None else self._calls.is_holding

    def flush(self) -> Found:
        if self._calls is not None:
            return self._calls.flush()
        rest, self._text = self._text, ""
        return visible(rest)


class _Calls(BareParser):
    def __init__(self, form: Format, start: str = "") -> None:
        """``start``: the mark in front of the calls."""
        self._form, self._start = form, start
        super().__init__()

    def _make_scanner(self) -> Scanner:
        return self._form.scanner()

    def push(self, text: str) -> Found:
        found = super().push(text)
        is_outside = not self._is_over and self._scanner.depth == 0
        is_text = is_outside and sum(map(len, self._unread)) > _MAX_BETWEEN_CHARS
        return [*found, *self._end("")] if is_text else found

    def _may_begin(self, begun: str) -> bool:
        return self._form.begins is None or self._form.begins(begun)

    def _call_in(self, text: str) -> Call | None:
        around = self._form.between.match(text)
        try:
            return self._form.read(text[around.end() if around else 0 :])
        except UNREADABLE:
            return None

    def _rest(self, text: str) -> Found:
        if self._is_over:
            return visible(text)
        if not self._num_calls:
            return visible(self._start + text)
        behind = self._form.behind.match(text)
        return [] if self._form.between.fullmatch(text) else visible(text[behind.end() if behind else 0 :])
