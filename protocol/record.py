"""What the journal holds of one request: everything needed to run it again from nothing."""

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


@dataclass(frozen=True, kw_only=True)  # without slots, for a property that is cached
class RequestRecord:
    """Written by prepare, read by execute and summarize, in the journal and in ``Prepared``."""

    request_id: str
    digest: int  # CRC-32 of the request as it was sent; by it a request that ends workers is known, whoever sends it
    prompt: bytes  # int32 token ids, after truncation
    num_truncated_tokens: int
    token_capacity: int  # output tokens at most; max_tokens cut to what context and pool leave
    seed: int
    lease_s: float
    priority: int = 0  # the lowest goes first, where the policy looks at it
    cache_salt: str = ""  # prefixes are shared among requests of the same salt only
    deadline_at: int = 0  # CLOCK_MONOTONIC in ns by which it must have ended; 0: none
    queue_deadline_at: int = 0  # by which it must have begun
    return_prompt: bool = False  # the summary brings the prompt's token ids
    sampling: dict[str, Any]  # SamplingParams.to_wire()
    index: int = 0  # among the sequences of one request, of which each has a record
    grammar: str = ""  # that the answer must match, as llguidance reads it; it was compiled once, to see that it can be
    owner: int = 0  # whose it is, see owners
    lora: str = ""  # the name of its adapter; empty: the model itself answers
    lora_digest: str = ""  # of what that was when the request was accepted

    @property
    def mark(self) -> int:
        return mark_of(self.digest, self.owner)

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """int32 [num_prompt_tokens], read-only."""
        return np.frombuffer(self.prompt, np.int32)

    @cached_property
    def params(self) -> SamplingParams:
        return SamplingParams.from_wire(self.sampling)

    @property
    def prefix_salt(self) -> str:
        """Prefixes are shared among requests of the same one only: of the same ``cache_salt`` and the same adapter.

        Keys and values are another adapter's own. What is before the first NUL is an adapter's name, or nothing.
        """
        if not self.lora and "\0" not in self.cache_salt:
            return self.cache_salt
        return f"{self.lora}\0{self.cache_salt}"

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives that are recorded beside each token's logprob, or None if not even that is.

        Samples are compared by it, whether the client asked for it or not.
        """
        asked: int | None = self.sampling.get("logprobs")
        compares = "best_of" in self.sampling and self.params.is_ranked
        return 0 if asked is None and compares else asked

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives that are recorded beside the logprob of each token of the prompt, or None if not even that is.

        The sequences of a request have one prompt: the first of them keeps its scores.
        """
        asked: int | None = self.sampling.get("prompt_logprobs")
        return None if self.index else asked

    @property
    def is_computed(self) -> bool:
        """Whether execute has something to do. An answer without tokens ends where it is met."""
        return self.token_capacity > 0 or self.num_prompt_logprobs is not None

    def to_bytes(self) -> bytes:
        return pack([getattr(self, name) for name in _NAMES])

    @classmethod
    def from_bytes(cls, data: bytes) -> RequestRecord:
        values = unpack(data)
        if type(values) is not list or len(values) != len(_NAMES):
            raise JournalError(f"a request record has {len(_NAMES)} fields, got {type(values).__name__}")
        return cls(**dict(zip(_NAMES, values, strict=True)))


def mark_of(digest: int, owner: int) -> int:
    """What tells a repeat from another request of the same id: of two owners the same request is two."""
    return owner << 32 | digest


def is_repeat(mark: int, first: int) -> bool:
    """Whether who comes with ``mark`` says the request with the mark ``first`` again, and may ask for it."""
    return mark & _DIGEST == first & _DIGEST and may_ask(mark >> 32, first >> 32)


_DIGEST = 0xFFFFFFFF  # of a mark
_NAMES = tuple(item.name for item in fields(RequestRecord))
