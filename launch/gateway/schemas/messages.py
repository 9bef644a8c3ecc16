"""The bodies of Anthropic's routes, /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from .base import ANYTHING, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ApiModel, List, Neutral, TokenBudget, few_parts, limited
from .template_variables import Effort


class Block(ApiModel):
    """A part of a message. Blocks of a reply can be sent back unchanged."""

    NEUTRAL: ClassVar[Neutral] = {
        **dict.fromkeys(("cache_control", "citations", "signature", "data", "is_error", "caller"), ANYTHING),
        **dict.fromkeys(("source", "title", "context", "toolset_name"), ()),  # known, but not supported
        "parsed_output": ANYTHING,
    }
    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = Field(None, min_length=1)
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[List[TextBlock], Field(max_length=MAX_PARTS)] | None = None


class TextBlock(ApiModel):
    NEUTRAL: ClassVar[Neutral] = dict.fromkeys(("cache_control", "citations"), ANYTHING)
    type: Literal["text"]
    text: str


Blocks = Annotated[List[Block], Field(max_length=MAX_PARTS)]


class AnthropicMessage(ApiModel):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class CustomTool(ApiModel):
    NEUTRAL: ClassVar[Neutral] = {
        **dict.fromkeys(("cache_control", "input_examples", "eager_input_streaming", "allowed_callers"), ANYTHING),
        "defer_loading": (False,),
    }
    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class AnthropicToolChoice(ApiModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(ApiModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: TokenBudget | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(ApiModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ApiModel):
    NEUTRAL: ClassVar[Neutral] = {"task_budget": ()}
    format: OutputFormat | None = None
    effort: Effort | None = Field(None, description="ignored if the chat template has no such variable")


class CountRequest(ApiModel):
    """A conversation, as accepted by both routes."""

    NEUTRAL: ClassVar[Neutral] = {
        **dict.fromkeys(
            ("cache_control", "metadata", "user_profile_id", "workspace_id", "context_management"), ANYTHING
        ),
        "speed": ("standard",),
        "mcp_servers": ([],),
        **dict.fromkeys(("thread", "billing_policy", "compaction", "fallback_credit_token"), ()),
        "fallbacks": ([],),
    }
    model: str | None = Field(None, description="as listed by /v1/models; by default the served model")
    messages: List[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | Annotated[List[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    tools: List[CustomTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="former name of output_config.format")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the chat template")

    _few_parts = field_validator("messages", mode="before")(few_parts)


class MessageRequest(CountRequest):
    """The next turn of a conversation, in Anthropic's format."""

    NEUTRAL: ClassVar[Neutral] = {
        **CountRequest.NEUTRAL,
        "service_tier": ("auto", "standard_only"),
        "container": (),
        "inference_geo": (),
        "diagnostics": (),
    }
    max_tokens: int = Field(ge=1, le=2**31 - 1, description="limited by the context")
    temperature: float | None = limited("temperature", description="0: greedy; the default is the model's, or 1")
    top_p: float | None = limited("top_p")
    top_k: int | None = limited("top_k")
    stop_sequences: List[str] | None = Field(None, description="at most 16 strings of at most 256 characters")
    stream: bool | None = None
