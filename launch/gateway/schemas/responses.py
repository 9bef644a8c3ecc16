"""The bodies of /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from .base import (
    ANYTHING,
    MAX_MESSAGES,
    MAX_TOOLS,
    ApiModel,
    List,
    Neutral,
    TokenBudget,
    few,
    few_entries,
    few_parts,
    limited,
)
from .chat import Parts
from .sampling import COMMON_NEUTRAL, SamplingFields
from .template_variables import Effort

MAX_FUNCTION_NAME = 128  # characters


class InputItem(ApiModel):
    """A message, the model's reasoning, a tool call, or its result. Output items can be sent back unchanged, but not by
    their ids, as nothing is stored.
    """

    NEUTRAL: ClassVar[Neutral] = {
        "status": ANYTHING,
        "phase": ANYTHING,
        "caller": ANYTHING,
        "async": (False,),
        "summary": ANYTHING,
    }
    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] | None = None
    id: str | None = None
    role: str | None = Field(None, min_length=1, max_length=64)
    content: str | Parts | None = None
    encrypted_content: str | None = Field(None, description="of reasoning; that of other services is ignored")
    call_id: str | None = None
    name: str | None = Field(None, min_length=1)
    namespace: str | None = Field(None, min_length=1, description="of the function that is called")
    arguments: str | None = None
    output: str | Parts | None = None


class ReasoningOptions(ApiModel):
    NEUTRAL: ClassVar[Neutral] = {
        **dict.fromkeys(("summary", "generate_summary", "context"), ("auto",)),
        "mode": ("standard",),
    }
    effort: Effort | None = None


class FunctionTool(ApiModel):
    NEUTRAL: ClassVar[Neutral] = {
        "allowed_callers": (["direct"],),
        **dict.fromkeys(("async", "defer_loading"), (False,)),
        "output_schema": (),
    }
    type: Literal["function"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(ApiModel):
    """Functions that a call names by their namespace too, such as those of an MCP server."""

    type: Literal["namespace"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    description: str | None = None
    tools: List[FunctionTool]


def _tool_class(tool: Any) -> str:
    """So that the errors of a tool are those of its own class, and of a type that is unknown those of a function."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "NamespaceTool" if kind == "namespace" else "FunctionTool"


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")] | Annotated[NamespaceTool, Tag("NamespaceTool")],
    Discriminator(_tool_class),
]


class NamedFunctionTool(ApiModel):
    type: Literal["function"]
    name: str


class ResponseToolChoice(ApiModel):
    """The tool that must be called, by ``name``, or the only ``tools`` that may be (``allowed_tools``)."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: List[NamedFunctionTool] | None = Field(None, min_length=1, max_length=MAX_TOOLS)


class TextFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(ApiModel):
    NEUTRAL: ClassVar[Neutral] = {"verbosity": ("medium",)}
    format: TextFormat | None = None


MAX_METADATA = 16  # entries
LOGPROBS = "message.output_text.logprobs"
PACKED_REASONING = "reasoning.encrypted_content"
Included = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url",
    "web_search_call.action.sources", "web_search_call.results",
]  # fmt: skip


class ResponsePrompt(ApiModel):
    """What the prompt of a response is made of."""

    NEUTRAL: ClassVar[Neutral] = {
        "truncation": ("disabled", "auto"),
        **dict.fromkeys(("previous_response_id", "conversation"), ()),
    }
    input: str | Annotated[List[InputItem], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: List[ResponseTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    _few_parts = field_validator("input", mode="before")(few_parts)
    _few_tools = field_validator("tools", mode="before")(few("tools"))

    @property
    def effort(self) -> Effort | None:
        return self.reasoning.effort if self.reasoning else None


class InputTokensRequest(ResponsePrompt):
    """A prompt whose tokens are counted, in OpenAI's format."""

    NEUTRAL: ClassVar[Neutral] = {**ResponsePrompt.NEUTRAL, "personality": ()}
    model: str | None = Field(None, description="as listed by /v1/models; by default the served model")


class ResponseRequest(ResponsePrompt, SamplingFields):
    """OpenAI's responses, except for everything that requires storage: nothing is kept after the reply."""

    NEUTRAL: ClassVar[Neutral] = {
        **{name: values for name, values in COMMON_NEUTRAL.items() if name != "metadata"},
        **ResponsePrompt.NEUTRAL,
        "store": (False, True),  # SDKs send true by default; the reply says false
        "background": (False,),
        "prompt": (),
        **dict.fromkeys(("max_tool_calls", "access_programs", "background_options", "image"), ()),
        "context_management": ([],),
        "client_metadata": ANYTHING,
        "n": (1,),
        "prompt_logprobs": (0,),
        "return_token_ids": (False,),
        "resumable": (False,),
        "max_tokens": (),
    }
    max_output_tokens: int | None = limited("max_tokens")
    include: List[Included] | None = Field(
        None,
        max_length=64,
        description=f"{LOGPROBS}, {PACKED_REASONING}; the others concern things that answers never contain here",
    )
    top_logprobs: int | None = Field(None, ge=0, le=20)
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA, description="returned in the reply")
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: TokenBudget | None = None

    _few_metadata = field_validator("metadata", mode="before")(few_entries(MAX_METADATA))

    def num_logprobs(self) -> int | None:
        """Alternatives per token; None: no logprobs."""
        return 0 if self.top_logprobs is None and LOGPROBS in (self.include or ()) else self.top_logprobs
