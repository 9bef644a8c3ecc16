"""Mistakes that only guessed tokens make possible; see ``mutations.py``."""

from __future__ import annotations

from tests.simulation.mutations import Patch, by_name
from triptych.protocol.journal.tokens import TokenWriter
from triptych.workers.execute.scheduling.proposals import Proposals


def what_follows_a_wrong_guess_is_said(patch: Patch) -> None:
    patch.setattr(Proposals, "check", lambda self, sequence, proposed, said: said[1:])


def guesses_go_on_behind_the_last_page(patch: Patch) -> None:
    """They are written to pages that the sequence does not have."""
    patch.setattr(Proposals, "_extend", lambda self, sequence, num_proposed: num_proposed)


def the_last_of_several_tokens_counts_first(patch: Patch) -> None:
    """Who dies in between leaves an answer with holes."""
    real = TokenWriter.publish_in_order

    def publish(self: TokenWriter, slots: object, indices: object, token_ids: object, now_ns: int) -> None:
        real(self, slots[::-1], indices[::-1], token_ids[::-1], now_ns)  # type: ignore[index]

    patch.setattr(TokenWriter, "publish_in_order", publish)


def pages_of_wrong_guesses_are_not_given_back(patch: Patch) -> None:
    patch.setattr(Proposals, "give_back", lambda self, sequence: None)


PROPOSAL_MUTATIONS = by_name(
    what_follows_a_wrong_guess_is_said,
    guesses_go_on_behind_the_last_page,
    pages_of_wrong_guesses_are_not_given_back,
    the_last_of_several_tokens_counts_first,
)
