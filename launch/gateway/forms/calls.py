"""Whether a request may use tools, and the tool calls of its answer in OpenAI's format."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ApiError, required, unsupported
from ..requests.chat_messages import wire_tools
from ..schemas.chat import Tool, ToolChoice
from ..state import Gateway
from ..tools.parser import Call, Found, Schemas, make_parser
from .call_schemas import arguments_form, calls_form
from .structure import call_alternative

MISTRAL_ID_CHARS = 9  # its template rejects ids of another length


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one request may do with tools."""

    tools: tuple[Tool, ...] = ()
    parser: str = "none"
    single: bool = False  # only the first call counts
    form: Mapping[str, Any] | None = None  # required form of an answer that must be, or may be, a call
    has_short_ids: bool = False  # the calls, also those that a form enforces

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.parser.partition(":")[0] in ("named", "required")

    async def beside(self, gateway: Gateway, text: Mapping[str, Any]) -> ToolUse:
        """For an answer whose text must have the form of the options ``text``, if they have one.

        Calls are an alternative to it, if the text is JSON. In channels, marks tell them apart.
        """
        wanted = text.get("structured")
        if not wanted or not self.tools or self.is_forced:
            return self
        if self.parser == "harmony":
            return replace(self, form={**wanted, "or_call": True})
        await gateway.load_words()
        form = call_alternative(gateway, wanted, self.tools, single=self.single)
        parser = "llama3f" if self.parser == "llama3_json" else self.parser
        return replace(self, form=form or wanted, parser=parser if form else "none")

    def options(self) -> dict[str, Any]:
        """Additional options for the pipeline. The template gets the tools. The text keeps its special tokens, some of
        which mark calls, unless a form excludes them.
        """
        if not self.tools:
            return {}
        form = {"structured": self.form} if self.form else {}
        has_marks = self.parser != "none" and not self.is_forced
        return {"tools": wire_tools(self.tools), **form, **({"skip_special_tokens": False} if has_marks else {})}

    def reader(self) -> CallReader:
        schemas = {tool.function.name: tool.function.parameters or {} for tool in self.tools}
        return CallReader(self.parser, schemas or None, single=self.single, has_short_ids=self.has_short_ids)

    @property
    def id_part(self) -> str:
        """The part of an answer's id that tells how to parse its calls when resuming; capitalized: only the first."""
        name = self.parser.partition(":")[0].removesuffix("_json").removesuffix("_coder")  # short: ids have a limit
        return "" if name == "none" else f".{name.capitalize() if self.single else name}"

    @classmethod
    def of_id(cls, name: str, *, has_short_ids: bool) -> ToolUse:
        """As far as the id tells; without a name the answer has no calls to parse."""
        return cls(parser=name.lower() or "none", single=name[:1].isupper(), has_short_ids=has_short_ids)


def tool_use(
    gateway: Gateway, tools: Sequence[Tool] | None, choice: str | ToolChoice | None, *, single: bool
) -> ToolUse:
    """
    Raises:
        ApiError: the model cannot call the tools, or the choice cannot be enforced.
    """
    if choice not in (None, "none", "auto") and not tools:
        raise ApiError("tool_choice needs tools", param="tool_choice")
    if not tools or choice == "none":
        return ToolUse()
    allowed, is_short = tools, has_short_ids(gateway)
    if isinstance(choice, ToolChoice):
        if choice.type == "function":
            tool = _named(tools, [required(choice.function, "tool_choice.function").name])[0]
            return ToolUse(tuple(tools), f"named:{tool.function.name}", True, arguments_form(tool), is_short)
        given = required(choice.allowed_tools, "tool_choice.allowed_tools")
        allowed, choice = _named(tools, [tool.function.name for tool in given.tools]), given.mode
    if choice == "required":  # the form excludes the other tools: they may stay in the prompt, which may be cached
        return ToolUse(tuple(tools), "required", single, calls_form(allowed, single=single), is_short)
    if gateway.tool_parser == "none":
        text = "the chat template of this model does not show it tools (see --tool-parser): describe them in a message"
        raise unsupported("tools", f"{text}, and ask for calls by tool_choice, 'required' or with the name of one")
    return ToolUse(tuple(allowed), gateway.tool_parser, single, has_short_ids=is_short)


def has_short_ids(gateway: Gateway) -> bool:
    """Whether the template rejects the usual ids of calls when they are sent back."""
    return gateway.tool_parser == "mistral"


def _named(tools: Sequence[Tool], names: Sequence[str]) -> list[Tool]:
    """The tools that ``tool_choice`` names."""
    known = {tool.function.name for tool in tools}
    if unknown := [name for name in names if name not in known]:
        raise ApiError(f"tool_choice names {unknown[0]!r:.100}, which is not in tools", param="tool_choice")
    return [tool for tool in tools if tool.function.name in names]


class CallReader:
    """Splits one answer's text into content and calls."""

    def __init__(
        self, parser: str, tools: Schemas | None = None, *, single: bool = False, has_short_ids: bool = False
    ) -> None:
        """``tools``: those of the request; they are not known when it is resumed."""
        self._parser = make_parser(parser, tools)
        self._name = parser
        self._has_short_ids = has_short_ids
        self._single = single
        self._num_calls = 0
        # White space at the beginning and after a call, which belongs to a text that follows; None: inside a text.
        self._space: str | None = None if parser == "none" else ""

    @property
    def is_plain(self) -> bool:
        return self._name == "none"

    @property
    def is_holding(self) -> bool:
        """Whether it holds back text that has not been returned yet."""
        return self._parser.is_holding or bool(self._space)

    def push(self, text: str) -> Found:
        return self._kept(self._parser.push(text))

    def flush(self) -> Found:
        found = self._kept(self._parser.flush())
        return [self._space] if self._space and not self._num_calls else found

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self._num_calls and reason == "stop" else reason

    def call_map(self, call: Call) -> dict[str, Any]:
        call_id = uuid.uuid4().hex
        call_id = call_id[:MISTRAL_ID_CHARS] if self._has_short_ids else f"call_{call_id[:24]}"
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def deltas(self, found: Found) -> list[dict[str, Any]]:
        """One delta of a chat chunk per part."""
        first = self._num_calls - sum(isinstance(part, Call) for part in found)
        result: list[dict[str, Any]] = []
        for part in found:
            if isinstance(part, str):
                result.append({"content": part})
            else:
                result.append({"tool_calls": [{"index": first, **self.call_map(part)}]})
                first += 1
        return result

    def _kept(self, found: Found) -> Found:
        kept: Found = []
        for part in found:
            if isinstance(part, Call):
                if self._single and self._num_calls:
                    continue
                self._num_calls += 1
                self._space = ""
            elif self._space is not None:
                part = self._space + part
                self._space = part if part.isspace() else None
                if part.isspace():
                    continue
            kept.append(part)
        return kept
