"""The bodies of /v1/rerank and /v1/score."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from .base import ANYTHING, ApiModel, List, Neutral, few_prompts

MAX_DOCUMENTS = 2048


class Document(ApiModel):
    text: str


Documents = Annotated[List[str | Document], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class _Relevance(ApiModel):
    """What both have in common."""

    NEUTRAL: ClassVar[Neutral] = {"user": ANYTHING, "use_activation": (True,), "activation": (True,)}
    model: str | None = None
    instruction: str | None = Field(None, description="what makes a text relevant; by default, answering a search")
    cache_salt: str | None = Field(None, max_length=256)
    priority: int | None = Field(None, ge=-1000, le=1000)
    deadline_ms: float | None = Field(None, gt=0, le=1e9)


class RerankRequest(_Relevance):
    """Texts to put in the order of their relevance to a query. Named as in Jina's, Cohere's and vLLM's APIs."""

    query: str
    documents: Documents
    top_n: int | None = Field(None, ge=0, le=MAX_DOCUMENTS, description="only the best so many; 0 and null: all")
    return_documents: bool | None = Field(None, description="whether results contain their texts; true by default")

    @field_validator("documents", mode="before")
    @classmethod
    def _are_few(cls, value: Any) -> Any:
        return few_prompts(value, MAX_DOCUMENTS)


class ScoreRequest(_Relevance):
    """Pairs of texts: one and each of several, or the first of each list, the second of each, and so on. As in vLLM."""

    text_1: str | List[str] = Field(description="queries")
    text_2: str | List[str] = Field(description="the texts that may be relevant to them")

    @field_validator("text_1", "text_2", mode="before")
    @classmethod
    def _are_few(cls, value: Any) -> Any:
        return few_prompts(value, MAX_DOCUMENTS)
