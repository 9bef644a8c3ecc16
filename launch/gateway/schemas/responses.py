"""The body of /v1/responses."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from .base import ANYTHING, ApiModel, Neutral, limited
from .chat import ContentPart
from .sampling import COMMON_NEUTRAL, SamplingFields


class InputItem(ApiModel):
    """A message, a call that the model made, or what came of it. Output items can be sent back as they are."""

    NEUTRAL: ClassVar[Neutral] = {
        "status": ANYTHING,
        "phase": ANYTHING,
        "caller": ANYTHING,
        "namespace": (),
        "async": (False,),
    }
    type: Literal["message", "function_call", "function_call_output"] | None = None
    id: str | None = None
    role: str | None = Field(None, min_length=1, max_length=64)
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class FunctionTool(ApiModel):
    type: Literal["function"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunctionTool(ApiModel):
    type: Literal["function"]
    name: str


class TextFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(ApiModel):
    NEUTRAL: ClassVar[Neutral] = {"verbosity": ("medium",)}
    format: TextFormat | None = None


class ResponseRequest(SamplingFields):
    """OpenAI's responses, without what would have to be stored: nothing is kept after the reply."""

    NEUTRAL: ClassVar[Neutral] = {
        **COMMON_NEUTRAL,
        "store": (False, True),  # true is what SDKs send by default; the reply says false
        "background": (False,),
        "include": ([],),
        "truncation": ("disabled", "auto"),
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "reasoning": ({},),
        "max_tool_calls": (),
        "n": (1,),
        "return_token_ids": (False,),
        "resumable": (False,),
        "max_tokens": (),
    }
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = limited("max_tokens")
    top_logprobs: int | None = Field(None, ge=0, le=20)
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
