"""The body of /v1/completions."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, field_validator

from .base import List, Neutral, few_prompts, limited
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

    @field_validator("prompt", mode="before")
    @classmethod
    def _are_few(cls, prompt: Any) -> Any:
        return few_prompts(prompt, MAX_PROMPTS)

    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts of the request."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return prompt  # type: ignore[return-value]
