"""Bodies of the smaller routes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from .base import ANYTHING, MAX_MESSAGES, MAX_TOOLS, ApiModel, List, Neutral, few, few_parts
from .chat import ChatMessage, TemplateFields, Tool
from .sampling import ServiceFields

Messages = Annotated[List[ChatMessage], Field(max_length=MAX_MESSAGES)]


class TokenizeRequest(TemplateFields):
    """A text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: List[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_special_tokens: bool | None = Field(None, description="for a text; true by default")
    return_token_strs: bool | None = None

    _few_parts = field_validator("messages", mode="before")(few_parts)


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: List[int] = Field(max_length=1 << 20)
    skip_special_tokens: bool | None = None


class LoadAdapterRequest(ApiModel):
    """In vLLM's format."""

    lora_name: str
    lora_path: str = Field(description="the adapter's folder, which must be below --lora-root")


class UnloadAdapterRequest(ApiModel):
    NEUTRAL: ClassVar[Neutral] = {"lora_int_id": ANYTHING}
    lora_name: str


class Choice(ApiModel):
    value: str | bool
    description: str | None = None


class Level(ApiModel):
    label: str
    description: str | None = None


class Question(ApiModel):
    """A question about the state. With ``options`` alone its type is ``choice``."""

    type: Literal["choice", "predicate", "score"] | None = None
    name: str | None = None
    instructions: str | None = Field(None, description="the question; question is an alias of it")
    question: str | None = None
    choices: List[Choice] | None = Field(None, min_length=2, max_length=255)
    options: List[str] | None = Field(None, min_length=2, max_length=255, description="choices without descriptions")
    levels: List[Level] | None = Field(None, min_length=2, max_length=255)


class DecisionRequest(ServiceFields):
    """Questions about one shared state."""

    NEUTRAL: ClassVar[Neutral] = {
        "prompt_cache_key": ANYTHING,
        "prompt_cache_options": ANYTHING,
        "safety_identifier": ANYTHING,
        "user": ANYTHING,
    }
    state: str | None = Field(None, description="what the questions are about; input is an alias of it")
    input: str | Messages | None = None
    questions: List[Question] = Field(min_length=1, max_length=400)

    _few_parts = field_validator("input", mode="before")(few_parts)
    _few_choices = field_validator("questions", mode="before")(few("questions and choices"))
