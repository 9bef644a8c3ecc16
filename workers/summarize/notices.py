"""What the other workers are told: which requests ended, and whose records may be used again."""

from __future__ import annotations

import numpy as np

from ...protocol import messages as m
from ...protocol.channels import Links

Key = tuple[int, int]  # (slot, generation)


class Notices:
    """Collected during a turn, and sent at its end. The journal says the same, so one that is lost costs time only."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self.released: list[Key] = []
        self.forgotten: list[Key] = []

    def send(self) -> None:
        if self.released:
            release = m.Release(*_columns(self.released))
            self._links.send("execute", release)
            self._links.send("prepare", release)
            self.released.clear()
        if self.forgotten:
            self._links.send("prepare", m.Forgotten(*_columns(self.forgotten)))
            self.forgotten.clear()


def _columns(keys: list[Key]) -> tuple[bytes, bytes]:
    slots, generations = np.array(keys, "<u4").reshape(-1, 2).T
    return slots.tobytes(), generations.tobytes()
