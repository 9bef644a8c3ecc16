"""Tells the other workers which requests ended, and whose records may be reused."""

from __future__ import annotations

from ...protocol import messages as m
from ...protocol.channels import Links
from ...protocol.record_key import Key, key_columns


class Notices:
    """Collected during a turn and sent at its end. The journal has the same information, so a lost one only delays."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self.released: list[Key] = []
        self.forgotten: list[Key] = []

    def send(self) -> None:
        if self.released:
            release = m.Release(*key_columns(self.released))
            self._links.send("execute", release)
            self._links.send("prepare", release)
            self.released.clear()
        if self.forgotten:
            self._links.send("prepare", m.Forgotten(*key_columns(self.forgotten)))
            self.forgotten.clear()
