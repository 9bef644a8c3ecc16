"""Mutations that need adapters that are loaded and unloaded; see ``mutations.py``."""

from __future__ import annotations

from tests.simulation.mutations import Patch, by_name
from triptych.driver import driver
from triptych.driver.adapters import LoadedAdapters
from triptych.protocol.board import WorkerPage
from triptych.protocol.model_card import LatestCard
from triptych.workers.execute.served_adapters import ServedAdapters


def every_loaded_adapter_is_offered(patch: Patch) -> None:
    """Including those being unloaded, and those that the next driver would not know."""

    def offered(self: LatestCard) -> dict[str, str]:
        card = self.read()
        return {} if card is None else card.adapters

    patch.setattr(LatestCard, "offered", offered)


def accepted_requests_are_not_waited_for(patch: Patch) -> None:
    patch.setattr(driver, "wait_until_unused", lambda *_, **__: None)


def requests_being_accepted_are_not_waited_for(patch: Patch) -> None:
    """prepare has seen the adapter, and writes the request to the journal after the driver has looked for requests."""
    patch.setattr(WorkerPage, "progress_ns", property(lambda self: 1 << 62))


def loaded_adapters_are_forgotten_with_the_driver(patch: Patch) -> None:
    patch.setattr(LoadedAdapters, "keep", lambda *_: None)


def adapters_change_their_numbers_while_requests_run(patch: Patch) -> None:
    patch.setattr(ServedAdapters, "_places", lambda self, names: sorted(names))


LOADING_MUTATIONS = by_name(
    every_loaded_adapter_is_offered,
    accepted_requests_are_not_waited_for,
    requests_being_accepted_are_not_waited_for,
    loaded_adapters_are_forgotten_with_the_driver,
    adapters_change_their_numbers_while_requests_run,
)
