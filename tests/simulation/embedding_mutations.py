"""Mutations that need requests for embeddings; see ``mutations.py``."""

from __future__ import annotations

from tests.simulation.mutations import Patch, by_name
from triptych.protocol.journal.layout import Journal
from triptych.protocol.journal.requests import RequestView
from triptych.workers.execute import bookkeeping
from triptych.workers.execute.scheduling.sequence import Sequence


def embedding_that_was_begun_before_a_crash_counts_as_made(patch: Patch) -> None:
    def has_prompt_results(journal: Journal, view: RequestView) -> bool:
        return view.record.asks_about_prompt and bool(journal.records["scheduled_ns"][view.slot])

    patch.setattr(bookkeeping, "has_prompt_results", has_prompt_results)


def embedding_is_made_of_every_chunk(patch: Patch) -> None:
    def unpooled_rows(sequence: Sequence, start: int, num_tokens: int) -> range:
        end = start + num_tokens
        return range(end - 1, end) if sequence.embedding_size else range(0)

    patch.setattr(Sequence, "unpooled_rows", unpooled_rows)


def cached_tokens_are_left_out_of_a_mean(patch: Patch) -> None:
    patch.setattr(Sequence, "num_reusable_tokens", property(lambda sequence: sequence.num_tokens - 1))


EMBEDDING_MUTATIONS = by_name(
    embedding_that_was_begun_before_a_crash_counts_as_made,
    embedding_is_made_of_every_chunk,
    cached_tokens_are_left_out_of_a_mean,
)
