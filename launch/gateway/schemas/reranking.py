"""The bodies of /v1/rerank and /v1/score."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from .base import ANYTHING, ApiModel, List, Neutral, few_entries
from .sampling import ServiceFields, kept_tokens

MAX_DOCUMENTS = 2048


class Document(ApiModel):
    text: str


Documents = Annotated[List[str | Document], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class _Relevance(ServiceFields):
    """What both have in common."""

    NEUTRAL: ClassVar[Neutral] = {"user": ANYTHING, "use_activation": (True,), "activation": (True,)}
    truncate_prompt_tokens: int | None = kept_tokens(
        "keep this many tokens of each prompt, without its middle; -1: as many as fit"
    )
    instruction: str | None = Field(None, description="what makes a text relevant; by default, answering a search")


class RerankRequest(_Relevance):
    """Texts to put in the order of their relevance to a query. Named as in Jina's, Cohere's and vLLM's APIs."""

    query: str
    documents: Documents
    top_n: int | None = Field(None, ge=0, le=MAX_DOCUMENTS, description="only the best so many; 0 and null: all")
    return_documents: bool | None = Field(None, description="whether results contain their texts; true by default")

    _few_documents = field_validator("documents", mode="before")(few_entries(MAX_DOCUMENTS))


class ScoreRequest(_Relevance):
    """Pairs of texts: one and each of several, or the first of each list, the second of each, and so on. As in vLLM."""

    text_1: str | List[str] = Field(description="queries")
    text_2: str | List[str] = Field(description="the texts that may be relevant to them")

    _few_texts = field_validator("text_1", "text_2", mode="before")(few_entries(MAX_DOCUMENTS))
