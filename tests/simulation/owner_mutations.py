"""Mistakes that only clients with keys make possible; see ``mutations.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.simulation.mutations import Patch, by_name
from triptych.protocol.journal.requests import RequestWriter
from triptych.protocol.owners import HOUSE
from triptych.workers.summarize import listing
from triptych.workers.summarize.choices import Requests


def an_id_is_enough(patch: Patch) -> None:
    """Who knows the id of a request may follow, end and acknowledge it."""
    real = Requests.get
    patch.setattr(Requests, "get", lambda self, wire_id, *, asker=HOUSE: real(self, wire_id))


def everybody_sees_all_that_is_there(patch: Patch) -> None:
    patch.setattr(listing, "may_ask", lambda asker, owner: True)


def only_this_life_knows_whose_a_request_is(patch: Patch) -> None:
    """Whose it is does not come into the journal."""
    real = RequestWriter.accept_all

    def accept_all(self: RequestWriter, records: Any, *rest: Any) -> Any:
        return real(self, [replace(record, owner=HOUSE) for record in records], *rest)

    patch.setattr(RequestWriter, "accept_all", accept_all)


OWNER_MUTATIONS = by_name(an_id_is_enough, everybody_sees_all_that_is_there, only_this_life_knows_whose_a_request_is)
