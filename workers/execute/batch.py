"""Turns a plan into the arrays of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import compress
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ...protocol.arrays import Int32
from .scheduling.plan import Chunk, Plan
from .scheduling.rows import Rows
from .scheduling.sequence import Key, Sequence
from .scheduling.states import Segment
from .step import PromptSpan, StepCut, StepInputs

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
    plan = _embedded_last(plan, sequences)
    scheduled = [sequences[chunk.key] for chunk in plan.chunks]
    token_ids, positions, owners, query_starts, last_rows, last_positions = _lay_out(plan, scheduled)
    block_tables = _gather_block_tables(scheduled, plan.num_decodes, rows)
    pages, offsets = np.divmod(positions, np.int32(page_size))
    samples = [chunk.samples for chunk in plan.chunks]
    sampled, sample_rows = scheduled, last_rows
    if plan.has_proposals:
        sampled, sample_rows = _all_sampled(plan, scheduled, last_rows)
    elif not all(samples):
        sampled, sample_rows = list(compress(scheduled, samples)), last_rows[samples]
    scored, score_rows = _needed(plan, scheduled, query_starts, Sequence.unscored_rows)
    embedded, embedded_rows = _needed(plan, scheduled, query_starts, Sequence.unpooled_rows)
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=block_tables[owners, pages] * np.int64(page_size) + offsets,
        query_starts=query_starts,
        context_lens=last_positions + np.int32(1),
        block_tables=block_tables,
        num_decodes=plan.num_decodes,
        sample_rows=sample_rows,
        sampled=sampled,
        carried=_carried(plan, last_rows, carried_rows) if carried_rows else None,
        adapters=_adapters(scheduled),
        cut=_cut(plan, scheduled),
        score_rows=score_rows,
        scored=scored,
        embedded_rows=embedded_rows,
        embedded=embedded,
    )


def _embedded_last(plan: Plan, sequences: Mapping[Key, Sequence]) -> Plan:
    """The plan with the chunks of which embeddings are made moved to the end, behind all rows of logits."""
    embedded = {c.key for c in plan.prefills if sequences[c.key].unpooled_rows(c.start, c.num_tokens)}
    return replace(plan, chunks=tuple(sorted(plan.chunks, key=lambda c: c.key in embedded))) if embedded else plan


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


def _needed(
    plan: Plan, scheduled: list[Sequence], query_starts: Int32, positions: Callable[[Sequence, int, int], range]
) -> tuple[list[PromptSpan], Int32]:
    """The tokens of prompts at the ``positions`` of which more is needed than keys and values, and their rows in the
    step, int32 [n].
    """
    if not plan.prefills:
        return [], np.empty(0, np.int32)
    spans: list[PromptSpan] = []
    rows: list[Int32] = []
    num_others = len(plan.chunks) - len(plan.prefills)
    firsts = query_starts[num_others:-1].tolist()
    for chunk, sequence, first in zip(plan.prefills, scheduled[num_others:], firsts, strict=True):
        if found := positions(sequence, chunk.start, chunk.num_tokens):
            spans.append(PromptSpan(sequence, found.start, len(found)))
            rows.append(np.arange(found.start, found.stop, dtype=np.int32) + np.int32(first - chunk.start))
    return spans, np.concatenate(rows) if rows else np.empty(0, np.int32)


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
