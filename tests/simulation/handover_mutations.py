"""Mutations that need requests that change hands; see ``mutations.py``."""

from __future__ import annotations

from tests.simulation.mutations import Patch, by_name
from triptych.workers.summarize.answer import Answer


def text_goes_on_where_an_earlier_reader_was(patch: Patch) -> None:
    """Not where the one that follows now is."""
    real = Answer.follow
    seen: dict[Answer, int] = {}

    def follow(self: Answer, peer: bytes, offset: int, again: bool) -> None:
        seen[self] = max(seen.get(self, 0), offset)
        real(self, peer, seen[self], again)

    patch.setattr(Answer, "follow", follow)


HANDOVER_MUTATIONS = by_name(text_goes_on_where_an_earlier_reader_was)
