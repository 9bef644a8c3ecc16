"""What prepare has died with: content that is worked on alone, and refused once it is named."""

from __future__ import annotations

from ...protocol.board import Board
from ...protocol.errors import Poisoned
from ...protocol.journal.deaths import POISONED


class Suspects:
    """The suspects on the board, by the key of their content: of a frame that was to be read, or of a request.

    Only the driver names them, while no prepare lives; of a death of execute or summarize it may be told at any time.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._deaths, self._version = board.suspects(), board.suspects_version

    def __contains__(self, key: int) -> bool:
        return key in self._deaths

    def check(self, key: int) -> bool:
        """Whether this is a suspect, which has to be alone.

        Raises:
            Poisoned: such a request is known to end workers.
        """
        if self._version != self._board.suspects_version:  # a death of execute or summarize has named one
            self._version, self._deaths = self._board.suspects_version, self._board.suspects()
        if self._deaths.get(key) == POISONED:
            raise Poisoned("the request, or one with the same content, ended a worker that worked on it, twice")
        return key in self._deaths

    def came_through(self, key: int) -> None:
        """It was worked on alone and did no harm."""
        if deaths := self._deaths.pop(key, 0):
            self._board.note_survival(key, deaths)
