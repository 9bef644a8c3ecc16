"""Functions in namespaces, as Codex sends those of an MCP server. Models know names alone, so they get both in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import ApiError
from ..schemas.responses import MAX_FUNCTION_NAME, FunctionTool, NamespaceTool


class Named(NamedTuple):
    """The name of a function in an item of a response."""

    name: str
    namespace: str | None = None

    @property
    def for_model(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"

    def to_wire(self) -> dict[str, str]:
        return {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}


def named_functions(tools: Sequence[FunctionTool | NamespaceTool] | None) -> list[tuple[Named, FunctionTool]]:
    """All functions, those of namespaces at their place.

    Raises:
        ApiError: the name of one is too long for the model.
    """
    named: list[tuple[Named, FunctionTool]] = []
    for index, tool in enumerate(tools or ()):
        within = [tool] if isinstance(tool, FunctionTool) else tool.tools
        namespace = None if isinstance(tool, FunctionTool) else tool.name
        for function in within:
            name = Named(function.name, namespace)
            if (length := len(name.for_model)) > MAX_FUNCTION_NAME:
                text = f"a function's name with its namespace has {length} characters, the limit is {MAX_FUNCTION_NAME}"
                raise ApiError(text, param=f"tools[{index}]")
            named.append((name, function))
    return named


def tool_map(tool: FunctionTool | NamespaceTool) -> dict[str, Any]:
    """The tool in the reply, as OpenAI's clients require it."""
    required = {"description": ""} if isinstance(tool, NamespaceTool) else {"strict": None, "parameters": None}
    return {**required, **tool.model_dump(exclude_none=True)}
