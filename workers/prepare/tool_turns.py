"""Turns of chats with tools for templates that leave out a part of what their models were trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Turn = dict[str, Any]
Functions = Sequence[Mapping[str, Any]]  # the names and arguments of calls
_LFM2_TOOLS = ("<|tool_list_start|>", "List of tools: ")  # in front of the tools
_PHI4_TOOLS = "'tools' in message"  # a part of the system's message, unlike in all other templates


def tool_turns(source: str, turns: Sequence[Turn], tools: Sequence[Any] | None) -> list[Turn]:
    """The turns as this template, whose text is ``source``, needs them. The calls of earlier turns become text as the
    model writes it, if the template does not mention them.
    """
    if "tool_calls" in source:
        return list(turns)
    if any(mark in source for mark in _LFM2_TOOLS):
        return [_with_calls(turn, _lfm2_calls) for turn in turns]
    if _PHI4_TOOLS in source:
        return _with_system_tools([_phi4_turn(turn) for turn in turns], tools)
    return list(turns)


def _with_calls(turn: Turn, write: Callable[[Functions], str]) -> Turn:
    functions = [call["function"] for call in turn.get("tool_calls", ())]
    return {**turn, "content": write(functions) + turn["content"]} if functions else turn


def _lfm2_calls(functions: Functions) -> str:
    return f"<|tool_call_start|>[{', '.join(map(_pythonic, functions))}]<|tool_call_end|>"


def _pythonic(function: Mapping[str, Any]) -> str:
    values = {
        key: json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
        for key, value in function["arguments"].items()
    }
    return f"{function['name']}({', '.join(f'{key}={value}' for key, value in values.items())})"


def _phi4_calls(functions: Functions) -> str:
    return f"<|tool_call|>{json.dumps(functions, ensure_ascii=False)}<|/tool_call|>"


def _phi4_turn(turn: Turn) -> Turn:
    """A role becomes a mark: ``<|tool|>`` is that of the tools."""
    return {**turn, "role": "tool_response"} if turn["role"] == "tool" else _with_calls(turn, _phi4_calls)


def _with_system_tools(turns: list[Turn], tools: Sequence[Any] | None) -> list[Turn]:
    if not tools:
        return turns
    num_system = int(bool(turns) and turns[0]["role"] == "system")
    system = turns[0] if num_system else {"role": "system", "content": ""}
    told = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    return [{**system, "tools": told}, *turns[num_system:]]
