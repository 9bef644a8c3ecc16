"""From a plan to the arrays of one forward pass."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .scheduling.plan import Plan
from .scheduling.rows import Rows
from .scheduling.sequence import Key, Sequence
from .step import Int32, StepInputs


def build_inputs(plan: Plan, sequences: Mapping[Key, Sequence], rows: Rows, *, page_size: int) -> StepInputs:
    """The inputs of a plan with at least one chunk.

    The loops over sequences here only collect references; all arithmetic is done once for the whole batch.
    """
    scheduled = [sequences[chunk.key] for chunk in plan.chunks]
    starts = np.array([chunk.start for chunk in plan.chunks], np.int32)
    lengths = np.array([chunk.num_tokens for chunk in plan.chunks], np.int32)
    query_starts = np.zeros(len(starts) + 1, np.int32)
    np.cumsum(lengths, out=query_starts[1:])

    owners = np.repeat(np.arange(len(starts)), lengths)  # [T], which sequence a token belongs to
    positions = np.arange(len(owners), dtype=np.int32) + (starts - query_starts[:-1])[owners]
    block_tables = _gather_block_tables(scheduled, plan.num_decodes, rows)
    pages = block_tables[owners, positions // page_size]
    samples = np.array([chunk.samples for chunk in plan.chunks], np.bool_)
    return StepInputs(
        token_ids=np.concatenate(
            [s.tokens[c.start : c.start + c.num_tokens] for s, c in zip(scheduled, plan.chunks, strict=True)]
        ),
        positions=positions,
        slot_mapping=pages.astype(np.int64) * page_size + positions % page_size,
        query_starts=query_starts,
        context_lens=starts + lengths,
        block_tables=block_tables,
        num_decodes=plan.num_decodes,
        sample_rows=query_starts[1:][samples] - np.int32(1),
        sampled=[s for s, c in zip(scheduled, plan.chunks, strict=True) if c.samples],
    )


def _gather_block_tables(scheduled: list[Sequence], num_decodes: int, rows: Rows) -> Int32:
    """Block tables padded with page 0, int32 [S, P], P the most pages one of them has.

    Those of decodes are copied from their rows, where they are kept as arrays; only prompts are converted from lists.
    """
    max_pages = max(len(sequence.block_table) for sequence in scheduled)
    tables = np.zeros((len(scheduled), max_pages), np.int32)
    if num_decodes:
        indices = np.array([sequence.row for sequence in scheduled[:num_decodes]], np.intp)
        tables[:num_decodes] = rows.block_tables[indices, :max_pages]
    for table, sequence in zip(tables[num_decodes:], scheduled[num_decodes:], strict=True):
        table[: len(sequence.block_table)] = sequence.block_table
    return tables
