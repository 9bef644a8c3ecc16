"""What the journal holds for each request: everything needed to run it again from scratch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .codec import pack, unpack
from .errors import JournalError
from .owners import may_ask
from .sampling import SamplingParams
from .scores import score_words


@dataclass(frozen=True, kw_only=True)  # no slots: it has a cached_property
class RequestRecord:
    """Written by prepare, read by execute and summarize, in the journal and in ``Prepared``."""

    request_id: str
    digest: int  # CRC-32 of the request as sent; identifies a request that crashes workers, whoever sends it
    prompt: bytes  # int32 token ids, after truncation
    num_truncated_tokens: int
    token_capacity: int  # max. output tokens: max_tokens, limited by the context and the page pool
    seed: int
    lease_s: float
    priority: int = 0  # lowest first, if the policy uses priorities
    cache_salt: str = ""  # prefixes are shared only among requests with the same salt
    deadline_at: int = 0  # when it must have ended, ns of the journal's clock; 0: none
    queue_deadline_at: int = 0  # when it must have started
    return_prompt: bool = False  # the summary includes the prompt's token ids
    sampling: dict[str, Any]  # SamplingParams.to_wire()
    index: int = 0  # among the sequences of the request, each of which has a record
    grammar: str = ""  # that the answer must match, in llguidance's format; known to compile
    reasoning: list[Any] | None = None  # that may come before what the grammar describes, see reasoning.to_wire
    continues_prompt: bool = False  # the answer's text goes on where the prompt's ends, as that of a completion
    owner: int = 0  # see owners
    lora: str = ""  # the name of its adapter; empty: the base model answers
    lora_digest: str = ""  # of that adapter when the request was accepted
    embedding_size: int = 0  # values of the embedding that it wants instead of an answer; 0: it wants none

    @property
    def mark(self) -> int:
        return mark_of(self.digest, self.owner)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """int32 [num_prompt_tokens], read-only."""
        return np.frombuffer(self.prompt, np.int32)

    @cached_property
    def params(self) -> SamplingParams:
        return SamplingParams.from_wire(self.sampling)

    @property
    def prefix_salt(self) -> str:
        """Prefixes are shared only among requests with the same salt: the same ``cache_salt`` and adapter.

        Keys and values depend on the adapter. The text before the first NUL is its name and digest, or empty.
        """
        if not self.lora and "\0" not in self.cache_salt:
            return self.cache_salt
        return f"{self.lora}{self.lora_digest}\0{self.cache_salt}"

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives recorded beside each token's logprob; None if no logprobs are recorded.

        Ranked samples are compared by their logprobs, which are then recorded even if the client did not ask.
        """
        asked: int | None = self.sampling.get("logprobs")
        compares = "best_of" in self.sampling and self.params.is_ranked
        return 0 if asked is None and compares else asked

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives recorded beside the logprob of each prompt token; None if no logprobs are recorded.

        The sequences of a request share one prompt: the first one keeps its scores.
        """
        asked: int | None = self.sampling.get("prompt_logprobs")
        return None if self.index else asked

    @property
    def is_computed(self) -> bool:
        """Whether execute has anything to compute. An answer without tokens ends as soon as it is seen."""
        return self.token_capacity > 0 or self.asks_about_prompt

    @property
    def asks_about_prompt(self) -> bool:
        """Whether it wants logprobs of its prompt, or an embedding."""
        return self.num_prompt_logprobs is not None or self.embedding_size > 0

    @property
    def num_prompt_words(self) -> int:
        """Four-byte words of what is computed about its prompt."""
        return self.embedding_size or score_words(self.num_prompt_tokens, self.num_prompt_logprobs)

    def to_bytes(self) -> bytes:
        return pack([getattr(self, name) for name in _NAMES])

    @classmethod
    def from_bytes(cls, data: bytes) -> RequestRecord:
        values = unpack(data)
        if type(values) is not list or len(values) != len(_NAMES):
            found = f"{len(values)}" if type(values) is list else type(values).__name__
            raise JournalError(f"a request record has {len(_NAMES)} fields, got {found}")
        return cls(**dict(zip(_NAMES, values, strict=True)))


def mark_of(digest: int, owner: int) -> int:
    """Tells a resent request from another one with the same id: the same request of two owners counts as two."""
    return owner << 32 | digest


def is_repeat(mark: int, first: int) -> bool:
    """Whether the request with ``mark`` is the one with the mark ``first`` sent again, by someone who may access it."""
    return mark & _DIGEST == first & _DIGEST and may_ask(mark >> 32, first >> 32)


_DIGEST = 0xFFFFFFFF  # of a mark
_NAMES = tuple(item.name for item in fields(RequestRecord))
