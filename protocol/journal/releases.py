"""summarize's part of the journal: how an answer ended, and when its record may be reused."""

from __future__ import annotations

from ..messages import FINISH_REASONS, finish_reason
from .layout import ACKNOWLEDGED, FORGOTTEN, RELEASED, UNREAD, Journal, split_word, word


class ReleaseWriter:
    """Ends requests. One per journal, in summarize: only summarize decides how an answer ended."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def release(self, slot: int, generation: int, *, num_tokens: int, reason: str, code: str = "") -> None:
        """The answer is complete: execute reclaims its pages and prepare its credit, even if the message is lost."""
        entry = self._journal.records[slot]
        entry["end_tokens"], entry["end_reason"] = num_tokens, FINISH_REASONS.index(reason)
        entry["end_code"] = code.encode()
        entry["release_word"] = word(generation, RELEASED)

    def acknowledge(self, slot: int, generation: int) -> None:
        """A client has this choice; the request is kept for its unread choices."""
        self._journal.records["release_word"][slot] = word(generation, ACKNOWLEDGED)

    def forget(self, slot: int, generation: int) -> None:
        """The client has its answer: prepare may reuse the record."""
        self._journal.records["release_word"][slot] = word(generation, FORGOTTEN)

    def give_up(self, slot: int, generation: int) -> None:
        """No client came for the answer: prepare may reuse the record, and the id counts as never used."""
        self._journal.records["release_word"][slot] = word(generation, UNREAD)


def read_release(journal: Journal, slot: int, generation: int) -> tuple[int, str] | None:
    """``(tokens of the answer, finish reason)`` if the request has ended, else None."""
    entry = journal.records[slot]
    current, _ = split_word(entry["release_word"])
    if current != generation:
        return None
    return int(entry["end_tokens"]), finish_reason(int(entry["end_reason"]))


def read_end_code(journal: Journal, slot: int, generation: int) -> str:
    """The error with which summarize itself ended this request; empty if it did not, or if the request goes on."""
    if not is_released(journal, slot, generation):
        return ""
    return bytes(journal.records["end_code"][slot]).decode(errors="replace")  # it may be damaged


def is_acknowledged(journal: Journal, slot: int, generation: int) -> bool:
    """Whether a client has this choice of a request that is kept for its other choices."""
    return int(journal.release_words[slot]) == word(generation, ACKNOWLEDGED)


def is_forgotten(journal: Journal, slot: int, generation: int) -> bool:
    """Whether the answer can no longer be requested."""
    return int(journal.release_words[slot]) in (word(generation, FORGOTTEN), word(generation, UNREAD))


def was_read(journal: Journal, slot: int, generation: int) -> bool:
    """Whether a client has acknowledged the end of this request."""
    return int(journal.release_words[slot]) == word(generation, FORGOTTEN)


def is_released(journal: Journal, slot: int, generation: int) -> bool:
    """Whether this request has ended."""
    return split_word(journal.release_words[slot])[0] == generation
