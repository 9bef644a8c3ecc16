"""The body of /v1/completions."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from .base import List, Neutral, few_entries, limited, one_or_several
from .sampling import COMMON_NEUTRAL, SamplingFields
from .structure import ResponseFormat

MAX_PROMPTS = 1024


class CompletionRequest(SamplingFields):
    """Text that continues one or several prompts."""

    NEUTRAL: ClassVar[Neutral] = {**COMMON_NEUTRAL, "suffix": ("",)}
    prompt: str | List[str] | List[int] | List[List[int]] = Field(description="text, token ids, or a list of either")
    best_of: int | None = limited("best_of", description="candidates, of which the n likeliest are returned")
    echo: bool | None = Field(None, description="return the prompt in front of the text")
    logprobs: int | None = Field(None, ge=0, le=20, description="of the chosen tokens and this many alternatives")
    response_format: ResponseFormat | None = None

    _few_prompts = field_validator("prompt", mode="before")(few_entries(MAX_PROMPTS))

    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts of the request."""
        return one_or_several(self.prompt)
