"""Which request a worker died of: the suspects of each death, and the one that is named.

Whoever was in the hands of a worker that died by its own fault is a suspect. After the restart suspects are run alone;
one that is alone in the hands of the worker when it dies again is named, and fails as poisoned. The beams of a search,
which never run without each other, are named together. A suspect that came through a run of its own is none any more.
Deaths that come from outside blame nobody.

Whoever was named is known by its content from then on: a client that sends it again, with another id or with the same,
is refused before it costs two more deaths.
"""

from __future__ import annotations

import logging

from ..protocol.board import ROLES, Board
from ..protocol.journal.deaths import POISONED, DeathWriter
from ..protocol.journal.layout import Journal, split_word

logger = logging.getLogger(__name__)


class Blame:
    """Reads the intents of the dead, writes the deaths into their requests' records."""

    def __init__(self, board: Board, journal: Journal) -> None:
        self._board = board
        self._journal = journal
        self._deaths = DeathWriter(journal)
        # What a worker left that died with an earlier driver is no work of the one that is started now.
        for role in ROLES:
            board.intent(role).clear()

    def note_death(self, role: str, *, internal: bool) -> int:
        """A worker died: how many deaths are explained now. For the supervisor, before it starts the next one.

        When somebody is named these are two: this one, and the one that made a suspect of him.
        """
        intent = self._board.intent(role)
        keys, num_ahead = (intent.read(), intent.num_ahead) if internal else ([], 0)
        intent.clear()
        has_named = self._note_digests(keys) if role == "prepare" else self._note_requests(role, keys, num_ahead)
        return 2 if has_named else 0

    def _note_requests(self, role: str, keys: list[int], num_ahead: int) -> bool:
        num_suspects, has_named = 0, False
        is_alone = len(set(map(self._request_of, keys))) == 1
        for key in keys:
            deaths = self._deaths.add(role, key, is_alone=is_alone, num_ahead=num_ahead)
            num_suspects += deaths is not None
            if deaths == POISONED:
                has_named = True
                self._board.set_suspect(int(self._journal.records["digest"][key >> 32]), POISONED)
                logger.error("record %d ended %s twice, the second time alone: it is poisoned", key >> 32, role)
        if num_suspects:
            logger.warning("%s died with %d requests in its hands: they are run alone first", role, num_suspects)
        return has_named

    def _request_of(self, key: int) -> tuple[int, int]:
        """What the records of one request have in common; of one that is gone, what no other has."""
        slot, generation = split_word(key)
        if slot >= self._journal.num_records or self._journal.generation(slot) != generation:
            return key, -1
        entry = self._journal.records[slot]
        return int(entry["last_slot"]), int(entry["last_generation"])

    def _note_digests(self, digests: list[int]) -> bool:
        """Requests that were not accepted yet have no record: they are known by their content, also with another id."""
        suspects, has_named = self._board.suspects(), False
        for digest in digests:
            is_named = digest in suspects and len(digests) == 1
            self._board.set_suspect(digest, POISONED if is_named else min(self._board.deaths_of(digest) + 1, POISONED))
            if is_named:
                has_named = True
                logger.error("a request with the digest %08x ended prepare twice: it is poisoned", digest)
        return has_named
