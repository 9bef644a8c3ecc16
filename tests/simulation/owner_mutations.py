"""Mutations that need clients with keys; see ``mutations.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.simulation.mutations import Patch, by_name
from triptych.protocol.journal.requests import RequestWriter
from triptych.protocol.owners import HOUSE
from triptych.workers.summarize import listing
from triptych.workers.summarize.choices import Requests


def request_id_is_enough(patch: Patch) -> None:
    """Any client that knows the id of a request may follow, abort and acknowledge it."""
    real = Requests.get
    patch.setattr(Requests, "get", lambda self, wire_id, *, asker=HOUSE: real(self, wire_id))


def every_client_sees_all_requests(patch: Patch) -> None:
    patch.setattr(listing, "may_ask", lambda asker, owner: True)


def owner_is_not_stored_in_the_journal(patch: Patch) -> None:
    """The owner of a request is lost with the process."""
    real = RequestWriter.accept_all

    def accept_all(self: RequestWriter, records: Any, *rest: Any) -> Any:
        return real(self, [replace(record, owner=HOUSE) for record in records], *rest)

    patch.setattr(RequestWriter, "accept_all", accept_all)


OWNER_MUTATIONS = by_name(request_id_is_enough, every_client_sees_all_requests, owner_is_not_stored_in_the_journal)
