"""Mutations that need proposed tokens; see ``mutations.py``."""

from __future__ import annotations

from tests.simulation.mutations import Patch, by_name
from triptych.protocol.journal.tokens import TokenWriter
from triptych.workers.execute.model.draft.model import DraftModel
from triptych.workers.execute.scheduling.proposals import Proposals
from triptych.workers.execute.scheduling.sequence import Sequence


def tokens_after_a_wrong_proposal_are_sent(patch: Patch) -> None:
    patch.setattr(Proposals, "check", lambda self, sequence, proposed, output: output[1:])


def proposals_continue_past_the_last_page(patch: Patch) -> None:
    """They are written to pages that the sequence does not have."""
    patch.setattr(Proposals, "_extend", lambda self, sequence, num_proposed: num_proposed)


def last_of_several_tokens_is_published_first(patch: Patch) -> None:
    """If execute dies in between, the answer has a hole."""
    real = TokenWriter.publish_in_order

    def publish(self: TokenWriter, slots: object, indices: object, token_ids: object, now_ns: int) -> None:
        real(self, slots[::-1], indices[::-1], token_ids[::-1], now_ns)  # type: ignore[index]

    patch.setattr(TokenWriter, "publish_in_order", publish)


def pages_of_wrong_proposals_are_not_freed(patch: Patch) -> None:
    patch.setattr(Proposals, "give_back", lambda self, sequence: None)


def draft_model_trusts_pages_that_others_wrote(patch: Patch) -> None:
    """After a preemption, or where a page was given to another sequence."""
    patch.setattr(DraftModel, "_num_filled", lambda self, identities, table: min(len(identities), len(table)))


def draft_model_does_not_see_that_a_sequence_got_other_pages(patch: Patch) -> None:
    real = DraftModel._num_known

    def num_known(self: DraftModel, sequence: Sequence) -> int:
        known = self._known.get(sequence.key)
        return real(self, sequence) if known is None or not known.table else known.num_computed

    patch.setattr(DraftModel, "_num_known", num_known)


PROPOSAL_MUTATIONS = by_name(
    tokens_after_a_wrong_proposal_are_sent,
    proposals_continue_past_the_last_page,
    pages_of_wrong_proposals_are_not_freed,
    last_of_several_tokens_is_published_first,
    draft_model_trusts_pages_that_others_wrote,
    draft_model_does_not_see_that_a_sequence_got_other_pages,
)
