"""Mistakes that only adapters that come and go make possible; see ``mutations.py``."""

from __future__ import annotations

from tests.simulation.mutations import Patch, by_name
from triptych.driver import driver
from triptych.driver.adapters import LoadedAdapters
from triptych.protocol.board import WorkerPage
from triptych.protocol.model_card import LatestCard


def whatever_is_loaded_is_offered(patch: Patch) -> None:
    """Also what is being unloaded, and what the next driver would not know."""

    def offered(self: LatestCard) -> dict[str, str]:
        card = self.read()
        return {} if card is None else card.adapters

    patch.setattr(LatestCard, "offered", offered)


def what_is_accepted_is_not_waited_for(patch: Patch) -> None:
    patch.setattr(driver, "wait_until_unused", lambda *_, **__: None)


def who_is_about_to_accept_is_not_waited_for(patch: Patch) -> None:
    """prepare has seen the adapter and writes the request down once it was looked whether there is one."""
    patch.setattr(WorkerPage, "progress_ns", property(lambda self: 1 << 62))


def what_was_loaded_is_forgotten_with_the_driver(patch: Patch) -> None:
    patch.setattr(LoadedAdapters, "keep", lambda *_: None)


LOADING_MUTATIONS = by_name(
    whatever_is_loaded_is_offered,
    what_is_accepted_is_not_waited_for,
    who_is_about_to_accept_is_not_waited_for,
    what_was_loaded_is_forgotten_with_the_driver,
)
