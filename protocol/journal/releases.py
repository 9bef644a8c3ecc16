"""summarize's part of the journal: how an answer ended, and when its record may be reused."""

from __future__ import annotations

import struct
import zlib

from ..messages import FINISH_REASONS, finish_reason
from .layout import ACKNOWLEDGED, FORGOTTEN, RELEASE_STATE, RELEASED, UNREAD, Journal, split_word, word


class ReleaseWriter:
    """Ends requests. One per journal, in summarize: only summarize decides how an answer ended."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def release(self, slot: int, generation: int, *, num_tokens: int, reason: str, code: str = "") -> None:
        """The answer is complete: execute reclaims its pages and prepare its credit, even if the message is lost."""
        entry = self._journal.records[slot]
        entry["end_tokens"], entry["end_reason"] = num_tokens, FINISH_REASONS.index(reason)
        entry["end_code"] = code.encode()
        self._write(slot, generation, RELEASED)

    def acknowledge(self, slot: int, generation: int) -> None:
        """A client has this choice; the request is kept for its unread choices."""
        self._write(slot, generation, ACKNOWLEDGED)

    def forget(self, slot: int, generation: int) -> None:
        """The client has its answer: prepare may reuse the record."""
        self._write(slot, generation, FORGOTTEN)

    def give_up(self, slot: int, generation: int) -> None:
        """No client came for the answer: prepare may reuse the record, and the id counts as never used."""
        self._write(slot, generation, UNREAD)

    def _write(self, slot: int, generation: int, state: int) -> None:
        self._journal.records["release_word"][slot] = release_word(self._journal, slot, generation, state)


def release_word(journal: Journal, slot: int, generation: int, state: int) -> int:
    """With a check of how the answer ended, and of the state, in the upper 29 of the 32 bits of the value."""
    tokens, reason, code = (journal.records[name][slot] for name in ("end_tokens", "end_reason", "end_code"))
    check = zlib.crc32(struct.pack("<4Q", generation, state, tokens, reason) + bytes(code))
    return word(generation, check & ~RELEASE_STATE | state)


def has_sound_end(journal: Journal, slot: int) -> bool:
    """Whether the check of an answer that has ended matches; for drivers, as it may change at any time."""
    generation, value = split_word(journal.release_words[slot])
    return int(journal.release_words[slot]) == release_word(journal, slot, generation, value & RELEASE_STATE)


def release_state(stored: int, generation: int) -> int:
    """0, RELEASED, FORGOTTEN, UNREAD or ACKNOWLEDGED, of a stored ``release_word``."""
    current, value = split_word(stored)
    return value & RELEASE_STATE if current == generation else 0


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
    return release_state(journal.release_words[slot], generation) == ACKNOWLEDGED


def is_forgotten(journal: Journal, slot: int, generation: int) -> bool:
    """Whether the answer can no longer be requested."""
    return release_state(journal.release_words[slot], generation) in (FORGOTTEN, UNREAD)


def was_read(journal: Journal, slot: int, generation: int) -> bool:
    """Whether a client has acknowledged the end of this request."""
    return release_state(journal.release_words[slot], generation) == FORGOTTEN


def is_released(journal: Journal, slot: int, generation: int) -> bool:
    """Whether this request has ended."""
    return split_word(journal.release_words[slot])[0] == generation
