"""The embedding of a prompt, in a form for callers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..protocol.errors import RequestError

if TYPE_CHECKING:
    from .stream import Completion


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """One prompt as a vector. Of most models it has length 1: the dot product of two is their cosine similarity."""

    request_id: str  # as given or generated
    values: npt.NDArray[np.float32]  # [dimensions], read-only
    summary: dict[str, Any] = field(repr=False)  # usage and ledger

    @classmethod
    def of(cls, completion: Completion) -> Embedding:
        """The embedding in the answer to a request that asked for one.

        Raises:
            RequestError: the request was aborted before.
        """
        values = completion.embedding
        if values is None:
            raise RequestError(f"request {completion.request_id} ended with {completion.finish_reason!r}, not embedded")
        return cls(completion.request_id, values, completion.summary)

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of the prompt, and how many of them were cached or truncated."""
        return dict(self.summary["usage"])

    @property
    def ledger(self) -> dict[str, Any]:
        """Milliseconds per stage."""
        return dict(self.summary["ledger"])


def read_embedding(summary: Mapping[str, Any]) -> npt.NDArray[np.float32] | None:
    """The embedding in a summary, float32 [dimensions], read-only; None if it was not requested."""
    packed = summary.get("embedding")
    return None if packed is None else np.frombuffer(packed, "<f4")
