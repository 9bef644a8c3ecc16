"""The body of /v1/embeddings."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from .base import ANYTHING, List, Neutral, few_entries, one_or_several
from .sampling import PromptFields

MAX_INPUTS = 2048  # OpenAI's limit


class EmbeddingRequest(PromptFields):
    """Texts that become vectors. Named as in OpenAI's and vLLM's APIs. Null means the default."""

    NEUTRAL: ClassVar[Neutral] = {
        "user": ANYTHING,
        "safety_identifier": ANYTHING,
        "metadata": ANYTHING,
        "add_special_tokens": (True,),
        "use_activation": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }
    input: str | List[str] | List[int] | List[List[int]] = Field(description="text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="numbers by default; base64: of float32, little-endian"
    )
    dimensions: int | None = Field(
        None, ge=1, le=2**31 - 1, description="only so many values, scaled like all of them; by default all"
    )

    normalize: bool | None = Field(None, description="whether the vectors have length 1: only as the model makes them")
    prompt_name: str | None = Field(
        None, description="the instruction of the checkpoint before each text; empty: none; by default the checkpoint's"
    )

    _few_inputs = field_validator("input", mode="before")(few_entries(MAX_INPUTS))

    def inputs(self) -> list[str] | list[list[int]]:
        """All inputs of the request."""
        return one_or_several(self.input)
