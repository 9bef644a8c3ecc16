"""Content that prepare has crashed on: it is processed alone, and refused once it is identified as the cause."""

from __future__ import annotations

from ...protocol.board import Board
from ...protocol.journal.deaths import poisoned


class Suspects:
    """The suspects on the board, by content key: of a frame to be decoded, or of a request.

    The driver adds suspects of prepare only while no prepare is running; those of execute or summarize at any time.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._deaths, self._version = board.suspects(), board.suspects_version

    def __contains__(self, key: int) -> bool:
        return key in self._deaths

    def check(self, key: int) -> bool:
        """Whether this is a suspect, which must be processed alone.

        Raises:
            Poisoned: a request with this content is known to crash workers.
        """
        if self._version != self._board.suspects_version:  # a crash of execute or summarize has been attributed
            self._version, self._deaths = self._board.suspects_version, self._board.suspects()
        text = "the request, or one with the same content, crashed the worker that processed it, twice"
        if error := poisoned(self._deaths.get(key, 0), text):
            raise error
        return key in self._deaths

    def clear(self, key: int) -> None:
        """It was processed alone without harm."""
        if deaths := self._deaths.pop(key, 0):
            self._board.note_survival(key, deaths)
