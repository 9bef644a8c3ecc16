"""Short sequences for self-tests, computed in two ragged steps on pages in scrambled order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from .....protocol.arrays import Int32
from ...scheduling.states import Segment
from ...step import StepCut, StepInputs

PAGE_SIZE = 16
Chunks = tuple[tuple[int, int], ...]  # tokens of each sequence in the first step and in the second

_CHUNKS: Chunks = ((20, 1), (3, 31), (33, 2))
_PAGES = np.array([[8, 2, 5], [1, 9, 3], [6, 4, 7]], dtype=np.int32)  # in scrambled order, none shared
NUM_PAGES, NUM_STATE_ROWS = _PAGES.size, 3 * len(_PAGES)  # of states, see ``_segments``
NUM_POSITIONS = max(map(sum, _CHUNKS))


def random_sequences(vocab_size: int, chunks: Chunks | None = None) -> list[Int32]:
    """One sequence for each pair of ``chunks``, by default this module's own."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocab_size, sum(each), dtype=np.int32) for each in chunks or _CHUNKS]


def paged_rows(
    run: Callable[[StepInputs], torch.Tensor],
    sequences: list[Int32],
    chunks: Chunks | None = None,
    *,
    page_size: int = PAGE_SIZE,
) -> torch.Tensor:
    """Compute rows [tokens, ...] in two steps on ``NUM_PAGES`` pages. ``run`` returns the rows in the order of the
    step; the result is ordered by sequence. ``chunks`` are those that the sequences were made for.
    """
    pieces: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in range(2):
        starts = [sum(each[:step]) for each in chunks or _CHUNKS]
        inputs = _step(sequences, starts, [each[step] for each in chunks or _CHUNKS], page_size)
        rows = run(inputs)
        for s, (start, end) in enumerate(pairwise(inputs.query_starts.tolist())):
            pieces[s].append(rows[start:end])
    return torch.cat([torch.cat(piece) for piece in pieces])


def decoded_again(
    run: Callable[[StepInputs], torch.Tensor], sequences: list[Int32], rows: torch.Tensor
) -> torch.Tensor:
    """Replace the last of ``paged_rows`` by that of a decode of one sequence alone."""
    last = sequences[-1:]
    inputs = _step(last, [len(last[0]) - 1], [1], PAGE_SIZE, _PAGES[-1:])
    return torch.cat([rows[:-1], run(inputs)])


def whole_rows(run: Callable[[StepInputs], torch.Tensor], sequences: list[Int32]) -> torch.Tensor:
    """Compute the same rows in one step."""
    return run(_step(sequences, [0] * len(sequences), list(map(len, sequences)), PAGE_SIZE))


def _step(
    sequences: list[Int32], starts: list[int], lengths: list[int], page_size: int, tables: Int32 = _PAGES
) -> StepInputs:
    positions = [np.arange(a, a + n, dtype=np.int32) for a, n in zip(starts, lengths, strict=True)]
    slots = [tables[s, p // page_size].astype(np.int64) * page_size + p % page_size for s, p in enumerate(positions)]
    num_decodes = int(lengths[0] == 1)
    return StepInputs(
        token_ids=np.concatenate([ids[p] for ids, p in zip(sequences, positions, strict=True)]),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        query_starts=np.cumsum([0, *lengths], dtype=np.int32),
        context_lens=np.array([p[-1] + 1 for p in positions], dtype=np.int32),
        block_tables=tables,
        num_decodes=num_decodes,
        sample_rows=np.arange(sum(lengths), dtype=np.int32),
        sampled=(),
        cut=StepCut.of(_segments(starts, lengths), num_decodes=num_decodes),
    )


def _segments(starts: list[int], lengths: list[int]) -> list[Segment]:
    """For S sequences, the first step writes rows 1 to S, the second S + 1 to 2 S. Chunks of at least four tokens
    have two segments.
    """
    segments, count = [], len(starts)
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True), 1):
        read, write, half = index, index + (count if start else 0), length // 2
        if half < 2:
            segments.append(Segment(read, write, start, length))
        else:
            between = index + 2 * count
            segments += [Segment(read, between, start, half), Segment(between, write, start + half, length - half)]
    return segments
