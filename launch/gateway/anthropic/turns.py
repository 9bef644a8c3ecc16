"""Converts a conversation in Anthropic's format to a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import ApiError, required
from ..requests.chat_messages import json_text, text_of
from ..schemas.chat import ChatMessage, ChatRequest, FunctionCall, Tool, ToolCall, ToolChoice, function_tools
from ..schemas.messages import AnthropicMessage, Block, CountRequest, MessageRequest, TextBlock
from ..schemas.structure import JsonSchema, ResponseFormat
from ..schemas.template_variables import knows_effort, thinking_variables

_ACCOUNTING = "x-anthropic-billing-header:"


def chat_of(body: CountRequest, template: str) -> ChatRequest:
    """The chat for a model with this chat template.

    Raises:
        ApiError: a block is misplaced or incomplete.
    """
    told = _instructions(body.system)
    system = [ChatMessage(role="system", content=told)] if told else []
    turns = [turn for index, message in enumerate(body.messages) for turn in _turns(f"messages[{index}]", message)]
    if has_begun := turns[-1].role == "assistant":
        _check_begun(f"messages[{len(body.messages) - 1}]", turns[-1])
    is_parallel = body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use
    variables: dict[str, Any] = {}
    is_told, budget = True, None
    if (thinking := body.thinking) is not None:
        budget = thinking.budget_tokens
        is_wanted = thinking.type != "disabled"
        variables = thinking_variables(is_wanted)
        is_told = is_wanted and thinking.display != "omitted"
    asked: dict[str, Any] = {
        "messages": system + turns,
        "continue_final_message": has_begun,
        "tools": _tools(body),
        "tool_choice": _choice(body),
        "parallel_tool_calls": is_parallel,
        "response_format": _format(body),
        "chat_template_kwargs": {**variables, **(body.chat_template_kwargs or {})},
        "reasoning_effort": body.output_config.effort if body.output_config and knows_effort(template) else None,
        "include_reasoning": is_told,
        "thinking_token_budget": budget,
    }
    if isinstance(body, MessageRequest):
        asked |= {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        asked["stop"] = body.stop_sequences
    return ChatRequest.model_construct(**asked)


def _instructions(system: str | Sequence[TextBlock] | None) -> str:
    """The text without what Claude Code writes at its beginning for Anthropic's accounts: a hash of the conversation,
    behind which no other conversation would find its prompt in the cache.
    """
    blocks = () if system is None else (system,) if isinstance(system, str) else [block.text for block in system]
    return "".join(text for text in blocks if not text.startswith(_ACCOUNTING))


def _check_begun(name: str, turn: ChatMessage) -> None:
    """Raise ApiError if the model cannot continue this turn."""
    text = text_of(turn.content)
    end = "a call" if turn.tool_calls else "white space" if text[-1:].isspace() else ""
    if not text and turn.reasoning_content:
        end = end or "reasoning"
    if end:
        raise ApiError(f"{name} is the assistant's and ends with {end}: it cannot be continued", param=name)


def _tools(body: CountRequest) -> list[Tool] | None:
    return function_tools((tool.name, tool.description, tool.input_schema) for tool in body.tools or ())


def _choice(body: CountRequest) -> str | ToolChoice | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    return ToolChoice.of(required(choice.name, "tool_choice.name"))


def _format(body: CountRequest) -> ResponseFormat | None:
    given = body.output_config.format if body.output_config else None
    if given is not None and body.output_format is not None:
        text = "output_format is the former name of output_config.format: only one of them can be given"
        raise ApiError(text, param="output_format")
    if (wanted := given or body.output_format) is None:
        return None
    schema = JsonSchema.model_validate({"name": "answer", "schema": wanted.schema_})
    return ResponseFormat(type="json_schema", json_schema=schema)


def _turns(name: str, message: AnthropicMessage) -> Iterator[ChatMessage]:
    """Tool results become turns of their own in a chat."""
    if isinstance(message.content, str):
        yield ChatMessage(role=message.role, content=message.content)
    elif message.role == "assistant":
        yield _assistant(name, message.content)
    else:
        text: str | None = None
        for index, block in enumerate(message.content):
            at = f"{name}.content[{index}]"
            if block.type == "text":
                text = (text or "") + _of(block, "text", at)
            elif block.type == "tool_result" and message.role == "user":
                if text is not None:
                    yield ChatMessage(role="user", content=text)
                    text = None
                call_id = _of(block, "tool_use_id", at)
                yield ChatMessage(role="tool", content=text_of(block.content), tool_call_id=call_id)
            else:
                raise _misplaced(block, message.role, at)
        if text is not None or not message.content:
            yield ChatMessage(role=message.role, content=text or "")


def _assistant(name: str, blocks: Sequence[Block]) -> ChatMessage:
    texts: dict[str, str] = {"text": "", "thinking": ""}
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        at = f"{name}.content[{index}]"
        if block.type in texts:
            texts[block.type] += _of(block, block.type, at)
        elif block.type == "tool_use":
            function = FunctionCall(name=_of(block, "name", at), arguments=json_text(block.input or {}, f"{at}.input"))
            calls.append(ToolCall(id=_of(block, "id", at), type="function", function=function))
        elif block.type != "redacted_thinking":  # encrypted by another service
            raise _misplaced(block, "assistant", at)
    return ChatMessage(
        role="assistant", content=texts["text"], reasoning_content=texts["thinking"] or None, tool_calls=calls or None
    )


def _of(block: Block, field: str, at: str) -> str:
    value: str | None = getattr(block, field)
    return required(value, f"{at}.{field}")


def _misplaced(block: Block, role: str, at: str) -> ApiError:
    return ApiError(f"{at} is a {block.type}, which a turn of the role {role} cannot have", param=at)
