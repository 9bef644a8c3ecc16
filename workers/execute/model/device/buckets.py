"""Which steps run as graphs, and of what sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...step import StepInputs

_FEW_CHUNKS, _MOST_CHUNKS = 4, 32
_TOKENS_PER_CHUNK = 16  # a graph for n tokens of chunks has room for n / 16 chunks, within these limits
_CHUNK_TOKENS = (64, 128, 256, 512, 768, 1024, 1536, 2048)
_MOST_TOKENS = 4096  # of a graph for steps that are full of prompts
_DENSE_ROWS = 256
_SPREAD = 4  # factor between numbers of decodes beside chunks: 48 padded rows take less time than 16 tokens of a chunk
# Steps with proposals: tokens, and the sequences that there is room for. Not as many sequences as tokens: attention
# launches programs for all of them, and even one that ends at once, for want of a sequence, takes a little time.
_CHECKS = ((16, 8), (32, 16), (64, 32), (96, 48), (128, 64), (128, 127))
CHECKED_TOKENS = _CHECKS[-1][0]  # the most, for which a GPU still takes longer to read weights than to use them
_CHECKED_LEN = 16  # tokens of one sequence, at most
_LEAST_SHARE = 0.8  # of launches in a step: 0.95 with 512 tokens of an 8B model on an H100, 0.29 with 2048


class StepSize(NamedTuple):
    """The size of a graph's step: decodes, and tokens of chunks of prompts.

    In a step with proposals all sequences are chunks, of at most 16 tokens, and all tokens are sampled.
    """

    num_rows: int
    num_chunk_tokens: int = 0
    num_checked: int = 0  # sequences of a step with proposals that there is room for

    @property
    def num_chunks(self) -> int:
        """Chunks that there is room for."""
        return self.num_checked or min(_MOST_CHUNKS, max(_FEW_CHUNKS, self.num_chunk_tokens // _TOKENS_PER_CHUNK))

    @property
    def num_seqs(self) -> int:
        """Decodes and chunks; where there are chunks, padding is one more."""
        return self.num_rows + self.num_chunks + 1 if self.num_chunk_tokens else self.num_rows

    @property
    def num_tokens(self) -> int:
        return self.num_rows + self.num_chunk_tokens

    @property
    def max_chunk_len(self) -> int:
        """Tokens that a chunk may have."""
        return min(_CHECKED_LEN, self.num_chunk_tokens) if self.num_checked else self.num_chunk_tokens

    @property
    def num_sampled(self) -> int:
        """Rows that are sampled: any decode, and one of any chunk, or all tokens."""
        if self.num_checked:
            return self.num_tokens
        return self.num_rows + self.num_chunks if self.num_chunk_tokens else self.num_rows


def decode_buckets(max_rows: int) -> list[int]:
    """Return the numbers of rows that get a graph: 1, 2, 4, then multiples of 8, from 256 on sixteen numbers for each
    doubling, and ``max_rows``.

    Source: the spacing of vLLM's and SGLang's capture sizes; a padded row costs little when there are few rows.
    """
    sizes = [1, 2, 4, *range(8, _DENSE_ROWS + 1, 8)]
    while (largest := sizes[-1]) < max_rows:
        step = largest // 16
        sizes += range(largest + step, 2 * largest + 1, step)
    return sorted({size for size in [*sizes, max_rows] if size <= max_rows})


def mixed_row_buckets(max_rows: int) -> list[int]:
    """Return the numbers of decodes that graphs with tokens of prompts have: 0, 16, 64, ..., and ``max_rows``."""
    sizes = [0]
    size = 16
    while size < max_rows:
        sizes.append(size)
        size *= _SPREAD
    return [*sizes, max_rows]


def chunk_buckets(max_tokens: int) -> list[int]:
    """Return the numbers of tokens of prompts that get a graph, of steps with at most ``max_tokens``."""
    sizes = [size for size in _CHUNK_TOKENS if size < max_tokens]
    return [*sizes, max_tokens] if max_tokens <= _MOST_TOKENS else sizes


def num_checked_together(max_rows: int, max_proposals: int) -> int:
    """Return how many of ``max_rows`` sequences can have ``max_proposals`` each in one step."""
    return min(max_rows, CHECKED_TOKENS // (1 + max_proposals))


def check_sizes(max_rows: int, max_proposals: int) -> list[StepSize]:
    """Return the sizes of steps with up to ``max_proposals`` for each of ``max_rows`` sequences that get a graph, the
    smallest first: for one sequence alone, then up to the first that holds them all.
    """
    alone = StepSize(0, 1 + max_proposals, 1)
    if not max_proposals or max_rows == 1:
        return [alone] if max_proposals else []
    most_tokens, most_seqs = min(max_rows * alone.num_tokens, CHECKED_TOKENS), min(max_rows, CHECKED_TOKENS - 1)
    holds_all = [num_tokens >= most_tokens and num_seqs >= most_seqs for num_tokens, num_seqs in _CHECKS]
    return [alone, *(StepSize(0, *size) for size in _CHECKS[: holds_all.index(True) + 1])]


class Router:
    """The rule: a step runs as the smallest graph that holds it, if there is one.

    Steps with prompts that are scored or embedded have none, nor have steps with prompts and proposals.
    """

    def __init__(
        self, max_rows: int, max_pages: int, chunk_tokens: Iterable[int] = (), checks: Iterable[StepSize] = ()
    ) -> None:
        """``chunk_tokens`` are the numbers of tokens of prompts that get a graph, ``checks`` the sizes of steps with
        proposals; the smallest first.
        """
        self.checks = list(checks)
        self.takes_short_chunks = False  # whether other steps without decodes may have one of these sizes, too
        self.buckets = decode_buckets(max_rows)
        self.mixed_rows = mixed_row_buckets(max_rows)
        self.chunk_tokens = list(chunk_tokens)
        self._max_pages = max_pages

    def keep_launch_bound(self, launch_share: Callable[[int], float]) -> None:
        """Keep the numbers of tokens of prompts for which launches take most of the time of a step without a graph.

        Other steps would only gain padding. ``launch_share`` measures the share, which falls with the number of tokens.
        """
        count = bisect_left(self.chunk_tokens, True, key=lambda num_tokens: launch_share(num_tokens) < _LEAST_SHARE)
        self.chunk_tokens = self.chunk_tokens[:count]

    def size(self, inputs: StepInputs) -> StepSize | None:
        """Return the smallest size that holds the step, or None if it must run without a graph."""
        num_seqs, num_pages = inputs.block_tables.shape
        num_decodes, num_sampled = inputs.num_decodes, len(inputs.sample_rows)
        if num_pages > self._max_pages or num_decodes > self.buckets[-1] or inputs.scored or inputs.embedded:
            return None
        if num_decodes == num_seqs:
            is_pure = 0 < num_decodes == num_sampled
            return StepSize(self.buckets[bisect_left(self.buckets, num_decodes)]) if is_pure else None
        if inputs.checks_proposals or self.takes_short_chunks:
            fits = (s for s in self.checks if len(inputs.token_ids) <= s.num_chunk_tokens and num_seqs <= s.num_checked)
            if (size := next(fits, None)) is not None:
                return size
        num_rows = self.mixed_rows[bisect_left(self.mixed_rows, num_decodes)]
        num_tokens, num_chunks = len(inputs.token_ids) - num_decodes, num_seqs - num_decodes
        sizes = (StepSize(num_rows, size) for size in self.chunk_tokens)
        fitting = (s for s in sizes if num_tokens <= s.num_chunk_tokens and num_chunks <= s.num_chunks)
        return next(fitting, None) if num_sampled <= num_seqs else None
