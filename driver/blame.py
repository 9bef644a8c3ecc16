"""Finds the request that crashes a worker: the suspects of each death, and the verdict.

All requests being processed by a worker that dies through an internal fault become suspects. After the restart,
suspects run alone; one that is alone in the worker when it dies again is identified and fails as poisoned. The beams of
a search, which only run together, are identified together. A suspect that survives a run of its own is cleared. Deaths
with an external cause produce no suspects.

A poisoned request is recognized by its content from then on: sent again, with the same id or another, it is refused
before it costs two more deaths.
"""

from __future__ import annotations

import logging

from ..protocol.board import ROLES, Board
from ..protocol.journal.deaths import OUT_OF_MEMORY, POISONED, DeathWriter
from ..protocol.journal.layout import Journal
from ..protocol.record_key import Key, key_of
from .deaths import Death

logger = logging.getLogger(__name__)


class Blame:
    """Reads the intents of dead workers and counts the deaths in the records of their requests."""

    def __init__(self, board: Board, journal: Journal) -> None:
        self._board = board
        self._journal = journal
        self._deaths = DeathWriter(journal)
        board.pardon(OUT_OF_MEMORY)  # it may have more by now
        # Intents of workers that died under an earlier driver say nothing about those started now.
        for role in ROLES:
            board.intent(role).clear()

    def note_death(self, death: Death) -> int:
        """Record a worker's death; returns how many deaths are now explained. Called before the worker is restarted.

        An identified request explains two: this death, and the one that made it a suspect.
        """
        intent = self._board.intent(death.role)
        numbers, num_ahead = (intent.read(), intent.num_ahead) if death.is_internal else ([], 0)
        intent.clear()
        verdict = OUT_OF_MEMORY if death.out_of_memory else POISONED
        if death.role == "prepare":
            has_named = self._note_digests(numbers, verdict)
        else:
            has_named = self._note_requests(death.role, list(map(key_of, numbers)), num_ahead, verdict)
        return 2 if has_named else 0

    def _note_requests(self, role: str, keys: list[Key], num_ahead: int, verdict: int) -> bool:
        num_suspects, has_named = 0, False
        is_alone = len(set(map(self._request_of, keys))) == 1
        for key in keys:
            deaths = self._deaths.add(role, key, is_alone=is_alone, num_ahead=num_ahead, verdict=verdict)
            num_suspects += deaths is not None
            if deaths == verdict:
                has_named = True
                self._board.set_suspect(int(self._journal.records["digest"][key[0]]), verdict)
                logger.error(
                    "record %d crashed %s twice, the second time alone%s: it is poisoned", key[0], role, _why(verdict)
                )
        if num_suspects:
            logger.warning("%s died while processing %d requests: they run alone first", role, num_suspects)
        return has_named

    def _request_of(self, key: Key) -> Key:
        """A key shared by all records of one request; unique if the record is gone."""
        slot, generation = key
        if slot >= self._journal.num_records or self._journal.generation(slot) != generation:
            return slot, -1 - generation
        entry = self._journal.records[slot]
        return int(entry["last_slot"]), int(entry["last_generation"])

    def _note_digests(self, digests: list[int], verdict: int) -> bool:
        """Requests not yet accepted have no record: they are identified by their content, whatever their id."""
        suspects, has_named = self._board.suspects(), False
        for digest in digests:
            is_named = digest in suspects and len(digests) == 1
            self._board.set_suspect(digest, verdict if is_named else min(self._board.deaths_of(digest) + 1, POISONED))
            if is_named:
                has_named = True
                why = _why(verdict)
                logger.error("a request with the digest %08x crashed prepare twice%s: it is poisoned", digest, why)
        return has_named


def _why(verdict: int) -> str:
    return ", as memory ran out" if verdict == OUT_OF_MEMORY else ""
