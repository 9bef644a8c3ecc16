"""Changes a row's logits before sampling: penalties, bias, grammar masks, and tokens that are not allowed yet.

All but the grammar masks are sparse: pairs of (row, token id) are gathered and scattered. Rows that need no change are
not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Rows
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..grammar.matcher import Bits, has_others
from ..scheduling.sequence import Sequence

_ALL_FREE: Mapping[int, Bits] = MappingProxyType({})


class _Entries(NamedTuple):
    """Some logits of one row."""

    row: int
    token_ids: npt.NDArray[np.int64]  # [n]
    amounts: npt.NDArray[np.float32] | float  # [n], or the same for all


def adjust_logits(
    logits: torch.Tensor,
    sequences: Rows[Sequence],
    lengths: Iterable[int],
    eos_token_ids: Iterable[int],
    allowed: Mapping[int, Bits] = _ALL_FREE,
) -> None:
    """Apply, in this order and in place on float32 [R, V]: penalties, logit bias, grammars, the mask of ``min_tokens``.

    ``lengths`` [R] are the sequences' token counts; sequences with a penalty are never advanced ahead of their tokens.
    ``allowed`` has the tokens that each row with a grammar may choose from.
    """
    _apply(_repeated(sequences), logits, lambda old, penalty: torch.where(old < 0, old * penalty, old / penalty))
    _apply(_produced(sequences), logits, lambda old, penalty: old - penalty)
    _apply(_biased(sequences), logits, lambda old, bias: old + bias)
    _mask(logits, allowed)
    early = _too_early(sequences, lengths, eos_token_ids, allowed)
    _apply(early, logits, lambda _, minus_infinity: minus_infinity)


def _repeated(sequences: Rows[Sequence]) -> Iterable[_Entries]:
    """Tokens of prompt and output, with the repetition penalty."""
    for row, sequence in enumerate(sequences):
        if sequence.params.repetition_penalty != 1.0:
            # A token that occurs twice has two entries, which compute the same value.
            tokens = sequence.tokens[: sequence.num_tokens].astype(np.int64)
            yield _Entries(row, tokens, sequence.params.repetition_penalty)


def _produced(sequences: Rows[Sequence]) -> Iterable[_Entries]:
    """Tokens of the output, with the sum of their presence and frequency penalties."""
    for row, sequence in enumerate(sequences):
        params = sequence.params
        if (params.presence_penalty or params.frequency_penalty) and sequence.num_output_tokens > 0:
            tokens, counts = np.unique(sequence.output_tokens, return_counts=True)
            penalties = params.presence_penalty + params.frequency_penalty * counts.astype(np.float32)
            yield _Entries(row, tokens.astype(np.int64), penalties.astype(np.float32))


def _biased(sequences: Rows[Sequence]) -> Iterable[_Entries]:
    for row, sequence in enumerate(sequences):
        bias = sequence.params.logit_bias
        if bias:
            yield _Entries(row, np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32))


def _too_early(
    sequences: Rows[Sequence], lengths: Iterable[int], eos_token_ids: Iterable[int], allowed: Mapping[int, Bits]
) -> Iterable[_Entries]:
    """Tokens that would end a sequence before ``min_tokens``: its stop ids, and end of sequence even if ignored.

    Where the grammar allows nothing else, it wins: no longer answer matches it.
    """
    for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        if length - sequence.num_prompt_tokens < sequence.params.min_tokens:
            ids = np.array([*sequence.stop_ids, *eos_token_ids], np.int64)
            if row not in allowed or has_others(allowed[row], ids):
                yield _Entries(row, ids, -np.inf)


def _mask(logits: torch.Tensor, allowed: Mapping[int, Bits]) -> None:
    """Set the logits of tokens that are not allowed to -inf.

    A minimum takes the same time for any number of tokens: for a row of 128,000, the table and the minimum take
    0.03 ms, ``masked_fill_`` 0.1 to 0.5 ms.
    """
    if not allowed:
        return
    on_cpu = logits.device.type == "cpu"
    by_byte = _ceilings()
    table = torch.from_numpy(by_byte).to(logits.device)
    for row, bits in allowed.items():
        if on_cpu:  # where numpy's gather is faster
            ceilings = torch.from_numpy(by_byte.take(bits, axis=0)).view(-1)
        else:
            ceilings = table.index_select(0, torch.from_numpy(bits).to(logits.device).int()).view(-1)
        known = logits[row, : len(ceilings)]
        torch.minimum(known, ceilings[: len(known)], out=known)
        logits[row, len(ceilings) :] = -torch.inf


@cache
def _ceilings() -> npt.NDArray[np.float32]:
    """For each byte of a mask, the upper bounds of its eight tokens' logits: float32 [256, 8]."""
    is_allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(is_allowed, np.inf, -np.inf).astype(np.float32)


def _apply(
    entries: Iterable[_Entries],
    logits: torch.Tensor,
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Replace each listed logit by ``change(logit, amount)``; ids beyond the vocabulary are skipped."""
    entries = list(entries)
    if not entries:
        return
    rows = np.concatenate([np.full(len(e.token_ids), e.row) for e in entries])
    ids = np.concatenate([e.token_ids for e in entries])
    amounts = np.concatenate([np.broadcast_to(np.float32(e.amounts), e.token_ids.shape) for e in entries])
    known = ids < logits.shape[1]
    index = tuple(torch.from_numpy(x[known]).to(logits.device) for x in (rows, ids))
    logits[index] = change(logits[index], torch.from_numpy(amounts[known]).to(logits.device))
