"""Turns a plan into the arrays of one forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import compress
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ...protocol.arrays import Int32
from .scheduling.plan import Chunk, Plan
from .scheduling.rows import Rows
from .scheduling.sequence import Key, Sequence
from .scheduling.states import Segment
from .step import ScoreSpan, StateSpan, StepCut, StepInputs

_NONE_CARRIED: Mapping[Key, int] = MappingProxyType({})


def build_inputs(
    plan: Plan,
    sequences: Mapping[Key, Sequence],
    rows: Rows,
    *,
    page_size: int,
    carried_rows: Mapping[Key, int] = _NONE_CARRIED,
) -> StepInputs:
    """The inputs of a plan with at least one chunk.

    ``carried_rows``: for each sequence whose last token is still being computed, its row in the previous step.

    The loops over sequences here only collect references; all arithmetic is done once for the whole batch.
    """
    plan, pooled = _embedded_last(plan, sequences)
    scheduled = [sequences[chunk.key] for chunk in plan.chunks]
    token_ids, positions, owners, query_starts, last_rows, last_positions = _lay_out(plan, scheduled)
    block_tables = _gather_block_tables(scheduled, plan.num_decodes, rows)
    pages = positions // page_size
    samples = [chunk.samples for chunk in plan.chunks]
    sampled, sample_rows = scheduled, last_rows
    if plan.has_proposals:
        sampled, sample_rows = _all_sampled(plan, scheduled, last_rows)
    elif not all(samples):
        sampled, sample_rows = list(compress(scheduled, samples)), last_rows[samples]
    spans = _score_spans(plan, scheduled)
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=block_tables[owners, pages] * np.int64(page_size) + (positions - pages * page_size),
        query_starts=query_starts,
        context_lens=last_positions + np.int32(1),
        block_tables=block_tables,
        num_decodes=plan.num_decodes,
        sample_rows=sample_rows,
        sampled=sampled,
        carried=_carried(plan, last_rows, carried_rows) if carried_rows else None,
        adapters=_adapters(scheduled),
        cut=_cut(plan, scheduled),
        **(_scored(plan, query_starts, spans) if spans else {}),
        **(_embedded(query_starts, pooled, plan, scheduled) if pooled else {}),
    )


def _embedded_last(plan: Plan, sequences: Mapping[Key, Sequence]) -> tuple[Plan, list[range]]:
    """The plan with the chunks of which embeddings are made moved to the end, behind all rows of logits; and for each
    of these chunks, the positions whose hidden states are needed.
    """
    wanted = {chunk.key: sequences[chunk.key].unpooled_rows(chunk.start, chunk.num_tokens) for chunk in plan.prefills}
    rows = {key: rows for key, rows in wanted.items() if rows}
    if rows:
        others = (chunk for chunk in plan.chunks if chunk.key not in rows)
        embedded = (chunk for chunk in plan.chunks if chunk.key in rows)
        plan = replace(plan, chunks=(*others, *embedded))
    return plan, [rows[chunk.key] for chunk in plan.chunks[len(plan.chunks) - len(rows) :]]


class _Layout(NamedTuple):
    """The T tokens of S sequences, one after the other."""

    token_ids: Int32  # [T]
    positions: Int32  # [T]
    owners: Int32  # [T], the sequence each token belongs to
    query_starts: Int32  # [S + 1]
    last_rows: Int32  # [S]
    last_positions: Int32  # [S]


def _lay_out(plan: Plan, scheduled: list[Sequence]) -> _Layout:
    chunks = plan.chunks
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    if plan.num_decodes == len(chunks):  # one token each, as in most steps: nothing to expand
        query_starts = np.arange(len(chunks) + 1, dtype=np.int32)
        rows = query_starts[:-1]
        token_ids = np.array([s.tokens.item(c.start) for s, c in zip(scheduled, chunks, strict=True)], np.int32)
        return _Layout(token_ids, starts, rows, query_starts, rows, starts)
    lengths = np.array([chunk.num_tokens for chunk in chunks], np.int32)
    query_starts = np.zeros(len(starts) + 1, np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    owners = np.repeat(np.arange(len(starts), dtype=np.int32), lengths)
    positions = np.arange(len(owners), dtype=np.int32) + (starts - query_starts[:-1])[owners]
    token_ids = np.concatenate([_tokens(s, c) for s, c in zip(scheduled, chunks, strict=True)])
    return _Layout(
        token_ids, positions, owners, query_starts, query_starts[1:] - np.int32(1), starts + lengths - np.int32(1)
    )  # fmt: skip


def _embedded(query_starts: Int32, pooled: list[range], plan: Plan, scheduled: list[Sequence]) -> dict[str, Any]:
    """The fields of ``StepInputs`` for embeddings. ``pooled`` are the positions needed of each of the last chunks."""
    first = len(scheduled) - len(pooled)
    chunks, sequences = plan.chunks[first:], scheduled[first:]
    offsets = [begin - chunk.start for begin, chunk in zip(query_starts[first:-1].tolist(), chunks, strict=True)]
    rows = [np.arange(rows.start, rows.stop) + offset for rows, offset in zip(pooled, offsets, strict=True)]
    spans = [StateSpan(each, rows.start, len(rows)) for each, rows in zip(sequences, pooled, strict=True)]
    return {"embedded_rows": np.concatenate(rows).astype(np.int32), "embedded": spans}


def _adapters(scheduled: list[Sequence]) -> Int32 | None:
    adapters = [sequence.adapter for sequence in scheduled]
    return np.array(adapters, np.int32) if any(adapters) else None


def _cut(plan: Plan, scheduled: list[Sequence]) -> StepCut | None:
    """Either all sequences have rows for their states, or none has."""
    if scheduled[0].state_rows is None:
        return None
    segments: list[Segment] = []
    for sequence, chunk in zip(scheduled, plan.chunks, strict=True):
        assert sequence.state_rows is not None, f"{sequence.key} runs without rows"
        segments += sequence.state_rows.segments(chunk.start, chunk.num_tokens)
    return StepCut.of(segments, num_decodes=plan.num_decodes)


def _tokens(sequence: Sequence, chunk: Chunk) -> Int32:
    end = chunk.start + chunk.num_tokens - len(chunk.proposed)
    known = sequence.tokens[chunk.start : end]
    return np.concatenate([known, np.array(chunk.proposed, np.int32)]) if chunk.proposed else known


def _all_sampled(plan: Plan, scheduled: list[Sequence], last_rows: Int32) -> tuple[list[Sequence], Int32]:
    """The sampled sequences and rows where some chunks have proposals: all rows of these are sampled."""
    sampled: list[Sequence] = []
    rows: list[int] = []
    for chunk, sequence, last in zip(plan.chunks, scheduled, last_rows.tolist(), strict=True):
        sampled += [sequence] * chunk.num_sampled
        rows += range(last + 1 - chunk.num_sampled, last + 1)
    return sampled, np.array(rows, np.int32)


def _score_spans(plan: Plan, scheduled: list[Sequence]) -> dict[int, ScoreSpan]:
    """The scored part of each chunk that has one, by chunk index."""
    spans: dict[int, ScoreSpan] = {}
    for index in range(plan.num_decodes, len(scheduled)):
        sequence, chunk = scheduled[index], plan.chunks[index]
        if not sequence.is_scored:
            rows = sequence.unscored_rows(chunk.start, chunk.num_tokens)
            if len(rows):
                spans[index] = ScoreSpan(sequence, rows.start, len(rows))
    return spans


def _scored(plan: Plan, query_starts: Int32, spans: Mapping[int, ScoreSpan]) -> dict[str, Any]:
    """The fields of ``StepInputs`` for scored rows."""
    firsts = [query_starts[index] + span.start - plan.chunks[index].start for index, span in spans.items()]
    rows = [np.arange(first, first + span.num_rows) for first, span in zip(firsts, spans.values(), strict=True)]
    return {"score_rows": np.concatenate(rows).astype(np.int32), "scored": tuple(spans.values())}


def _carried(plan: Plan, last_rows: Int32, carried_rows: Mapping[Key, int]) -> Int32:
    """For each token of the step, its row in the previous step, or -1. Only a sequence's last token can be carried."""
    carried = np.full(last_rows[-1] + 1, -1, np.int32)
    carried[last_rows] = [carried_rows.get(chunk.key, -1) for chunk in plan.chunks]
    return carried


def _gather_block_tables(scheduled: list[Sequence], num_decodes: int, rows: Rows) -> Int32:
    """Block tables padded with page 0, int32 [S, P], where P is the number of pages of the longest.

    Those of decodes are copied from their rows, where they are kept as arrays; only those of prompts are converted from
    lists.
    """
    max_pages = max(len(sequence.block_table) for sequence in scheduled)
    seated = [sequence.row for sequence in scheduled[:num_decodes]]
    if None in seated:  # a step that is run again: some sequences have left their rows
        num_decodes = 0
    decodes = rows.block_tables[np.array(seated[:num_decodes], np.intp), :max_pages]
    if num_decodes == len(scheduled):
        return decodes
    tables = np.zeros((len(scheduled), max_pages), np.int32)
    tables[:num_decodes] = decodes
    for table, sequence in zip(tables[num_decodes:], scheduled[num_decodes:], strict=True):
        table[: len(sequence.block_table)] = sequence.block_table
    return tables
