"""Statistics of summarize, for the board."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ...protocol.messages import FINISH_REASONS
from .answer import Answer
from .ends import EMBEDDING, Ends
from .rate import Rate


class Figures:
    """Counters of this process, from its start."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_stale_tokens = 0
        self.num_bad_frames = 0
        self._rate = Rate()

    def add_tokens(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._rate.add(num_tokens)

    @property
    def tokens_per_second(self) -> float:
        return self._rate.per_second()

    def to_map(self, answers: Collection[Answer], ends: Ends, *, num_bad_frames: int) -> dict[str, Any]:
        """``num_bad_frames``: frames that the socket has dropped."""
        return {
            "live": sum(not answer.stream.is_finished for answer in answers),
            "unread": sum(answer.stream.is_finished for answer in answers),
            "followed": sum(answer.peer is not None for answer in answers),
            "tokens": self.num_tokens,
            "tokens_per_second": self.tokens_per_second,
            "finished": {reason: ends.num_ended[reason] for reason in (*FINISH_REASONS[1:], EMBEDDING)},
            "adapted": dict(ends.num_adapted),
            "histograms": ends.histograms.to_wire(),
            "forgotten_unread": ends.num_unread,
            "stale_tokens": self.num_stale_tokens,
            "bad_frames": self.num_bad_frames + num_bad_frames,
        }
