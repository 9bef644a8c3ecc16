"""How likely a model finds the tokens of a prompt: columns, and their layout in the journal and in a message.

A prompt of P tokens has P - 1 rows, for its second token to its last: the first one is not predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MAX_SCORE_BYTES = 4 << 20  # of one request: they travel in one message
NO_TOKEN = -1  # fills missing alternatives if the vocabulary is too small


class ScoreColumns(NamedTuple):
    """One row for each of n tokens. Logprobs are natural logs of the raw model, before penalties and temperature."""

    logprobs: npt.NDArray[np.float32]  # [n], of the tokens themselves
    ranks: npt.NDArray[np.int32]  # [n], 1: the likeliest token
    token_ids: npt.NDArray[np.int32]  # [n, k], the k likeliest, best first
    top_logprobs: npt.NDArray[np.float32]  # [n, k]

    def to_wire(self) -> dict[str, bytes]:
        """Each column as little-endian bytes."""
        return {name: column.astype(_DTYPES[name]).tobytes() for name, column in self._asdict().items()}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> ScoreColumns:
        columns: dict[str, npt.NDArray[Any]] = {n: np.frombuffer(wire[n], dtype) for n, dtype in _DTYPES.items()}
        num_rows = len(columns["logprobs"])
        for name in ("token_ids", "top_logprobs"):
            columns[name] = columns[name].reshape(num_rows, len(columns[name]) // max(1, num_rows))
        return cls(**columns)


_DTYPES = {"logprobs": "<f4", "ranks": "<i4", "token_ids": "<i4", "top_logprobs": "<f4"}


def row_words(num_alternatives: int) -> int:
    """Four-byte words of a row in the journal: logprob and rank, then id and logprob of each alternative."""
    return 2 + 2 * num_alternatives


def score_words(num_prompt_tokens: int, num_alternatives: int | None) -> int:
    """Words of all rows of a prompt; None alternatives: no rows."""
    return 0 if num_alternatives is None else (num_prompt_tokens - 1) * row_words(num_alternatives)


def pack_scores(scores: ScoreColumns, num_alternatives: int) -> npt.NDArray[np.uint32]:
    """uint32 [n, row_words(num_alternatives)]."""
    rows = np.full((len(scores.logprobs), row_words(num_alternatives)), NO_TOKEN, np.int32).view(np.uint32)
    rows[:, 0], rows[:, 1] = scores.logprobs.view(np.uint32), scores.ranks.view(np.uint32)
    width = scores.token_ids.shape[1]
    rows[:, 2 : 2 + 2 * width : 2] = np.ascontiguousarray(scores.token_ids).view(np.uint32)
    rows[:, 3 : 3 + 2 * width : 2] = np.ascontiguousarray(scores.top_logprobs).view(np.uint32)
    return rows


def unpack_scores(rows: npt.NDArray[np.uint32]) -> ScoreColumns:
    """The inverse of ``pack_scores``, from uint32 [n, words]."""
    ints, floats = rows.view(np.int32), rows.view(np.float32)
    return ScoreColumns(floats[:, 0], ints[:, 1], ints[:, 2::2], floats[:, 3::2])
