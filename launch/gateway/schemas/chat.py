"""The body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from ..errors import ApiError, unsupported
from .base import ANYTHING, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ApiModel, List, Neutral, TokenBudget, few_parts, limited
from .sampling import COMMON_NEUTRAL, SamplingFields
from .structure import ResponseFormat
from .template_variables import Effort, effort_variables, template_variables


class ContentPart(ApiModel):
    """A part of a message: only text is supported."""

    type: Literal["text", "input_text", "output_text", "reasoning_text"]
    text: str
    NEUTRAL: ClassVar[Neutral] = {
        **dict.fromkeys(("annotations", "logprobs", "prompt_cache_breakpoint", "cache_control"), ANYTHING),
        # The fields of the reply that the part is from: OpenAI's agents for JavaScript keep them here.
        **dict.fromkeys(("role", "refusal", "reasoning_content", "reasoning", "tool_calls", "token_ids"), ANYTHING),
        **dict.fromkeys(("image_url", "input_audio", "audio_url", "video_url", "file"), ()),  # known, but not supported
    }


Parts = Annotated[List[ContentPart], Field(max_length=MAX_PARTS)]


class FunctionCall(ApiModel):
    NEUTRAL: ClassVar[Neutral] = {"parsed_arguments": ANYTHING}
    name: str = Field(min_length=1)
    arguments: str = Field(description="JSON text")


class ToolCall(ApiModel):
    """A tool call of the assistant."""

    NEUTRAL: ClassVar[Neutral] = dict.fromkeys(("index", "extra_content", "provider_specific_fields"), ANYTHING)
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(ApiModel):
    """One turn. Replies of this API can be sent back unchanged."""

    NEUTRAL: ClassVar[Neutral] = {
        "type": ("message",),
        **dict.fromkeys(("refusal", "annotations", "token_ids"), ANYTHING),
        # Fields that clients keep from a reply, or add for another service.
        **dict.fromkeys(
            ("parsed", "provider_specific_fields", "thinking_blocks", "reasoning_details", "cache_control"), ANYTHING
        ),
        "audio": (),
        "function_call": (),
    }
    role: str = Field(min_length=1, max_length=64)
    content: str | Parts | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # an alias of it
    tool_calls: List[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(ApiModel):
    name: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema")
    strict: bool | None = None


class Tool(ApiModel):
    NEUTRAL: ClassVar[Neutral] = {"cache_control": ANYTHING}
    type: Literal["function"]
    function: Function


def function_tools(described: Iterable[tuple[str, str | None, dict[str, Any] | None]]) -> list[Tool] | None:
    """Tools from the name, description and parameters used by other routes; None if there are none."""
    functions = [Function(name=name, description=text, parameters=schema) for name, text, schema in described]
    return [Tool(type="function", function=function) for function in functions] or None


class NamedFunction(ApiModel):
    name: str


class NamedTool(ApiModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(ApiModel):
    mode: Literal["auto", "required"]
    tools: List[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class ToolChoice(ApiModel):
    """The tool that must be called (``function``), or the only ones that may be (``allowed_tools``)."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @classmethod
    def of(cls, name: str) -> ToolChoice:
        return cls(type="function", function=NamedFunction(name=name))

    @classmethod
    def among(cls, names: Iterable[str], mode: Literal["auto", "required"]) -> ToolChoice:
        tools = [NamedTool(type="function", function=NamedFunction(name=name)) for name in names]
        return cls(type="allowed_tools", allowed_tools=AllowedTools(mode=mode, tools=tools))


class TemplateFields(ApiModel):
    """Controls how a chat becomes a prompt."""

    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the chat template")
    reasoning_effort: Effort | None = Field(None, description="the template's variable of this name, if it has one")
    continue_final_message: bool | None = Field(
        None, description="the model continues the last message, which must be the assistant's"
    )
    add_generation_prompt: bool | None = Field(None, description="the opposite of continue_final_message")

    def template_options(self, template: str) -> dict[str, Any]:
        """The options for the pipeline, for a model with this chat template.

        Raises:
            ApiError: a turn is to be both started and continued, or neither; the template does not know this effort.
        """
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            text = "add_generation_prompt and continue_final_message are both true: a turn is either new or continued"
            raise ApiError(text, param="add_generation_prompt")
        if self.add_generation_prompt is False and not continues:
            text = "add_generation_prompt is false, which requires continue_final_message: true"
            raise unsupported("add_generation_prompt", text)
        options: dict[str, Any] = {"continue_final_message": True} if continues else {}
        effort = effort_variables(self.reasoning_effort, template, param="reasoning_effort")
        return options | template_variables(effort, self.chat_template_kwargs)


class ChatRequest(SamplingFields, TemplateFields):
    """The next turn of a conversation."""

    NEUTRAL: ClassVar[Neutral] = {
        **COMMON_NEUTRAL,
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "functions": ([],),
        "function_call": ("none",),
        "verbosity": ("medium",),
        "best_of": (1,),
        "documents": ([],),
        "chat_template": (),
        "mm_processor_kwargs": ({},),
        "stream_reasoning": (True,),
    }
    messages: List[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = limited("max_tokens", description="by default until the context is full")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: List[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: only the first call is returned")
    echo: bool | None = Field(None, description="return a continued message from its beginning")
    separate_reasoning: bool | None = Field(None, description="false: reasoning stays in the content, with its tags")
    include_reasoning: bool | None = Field(None, description="false: reasoning is left out of the reply")
    thinking_token_budget: TokenBudget | None = Field(None, description="tokens of reasoning, at most")

    _few_parts = field_validator("messages", mode="before")(few_parts)
