"""The sampler: chooses one token per row of a step's logits, by each request's own parameters."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from ....protocol.arrays import Float32, Int32
from ....protocol.sampling import SamplingParams
from ..grammar.masks import NO_MASKS, PendingMasks
from ..scheduling.beam_search import Candidates, num_candidates
from ..scheduling.sequence import Sequence
from ..step import StepInputs, StepResult, states_of
from .adjust import adjust_logits
from .draw import Filters, draw, top_k_of
from .logprobs import find_logprobs, logprobs_by_row, wanted_logprobs
from .prompt_scores import score_prompts
from .rng import uniforms

_PART = 1 << 17  # logits that are drawn from at once, on a CPU


class Sampler:
    """Chooses from the model's whole vocabulary, which may contain ids unknown to the tokenizer.

    A row's result depends only on its logits and its sequence, never on other rows.
    """

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self.eos_token_ids = eos_token_ids

    def finish(
        self,
        logits: torch.Tensor,
        inputs: StepInputs,
        masks: PendingMasks | None = None,
        *,
        hidden: Float32 | None = None,
    ) -> StepResult:
        """The result of a step from the logits of its ``logit_rows``, float32 [R + C, V], which are overwritten, and
        the hidden states of its ``embedded_rows`` [E, channels], if it has any.
        """
        num_sampled = len(inputs.sample_rows)
        scores = score_prompts(logits[num_sampled:], inputs.scored)
        result = self.sample(logits[:num_sampled], inputs.sampled, masks, lengths=inputs.sampled_lengths)
        states = [] if hidden is None else states_of(inputs, hidden)
        return replace(result, scores=scores, states=states) if scores or states else result

    def sample(
        self,
        logits: torch.Tensor,
        sequences: Rows[Sequence],
        masks: PendingMasks | None = None,
        *,
        lengths: Int32 | None = None,
    ) -> StepResult:
        """The next token of each sequence, from float32 [R, V], which is overwritten.

        ``masks`` are those of the rows with a grammar, waited for after all other work is under way. ``lengths`` [R]
        are the sequences' token counts at the step, if they may have advanced since.
        """
        if not sequences:
            return StepResult(np.empty(0, dtype=np.int32))
        if lengths is None:
            lengths = np.array([sequence.num_tokens for sequence in sequences], np.int32)
        with _one_thread():
            return self._sample(logits, sequences, masks, lengths)

    def _sample(
        self, logits: torch.Tensor, sequences: Rows[Sequence], masks: PendingMasks | None, lengths: Int32
    ) -> StepResult:
        counts = wanted_logprobs(sequences)
        raw = logits[list(counts)].log_softmax(dim=-1) if counts else None
        beams = [row for row, sequence in enumerate(sequences) if sequence.is_beam]
        if beams:
            logits[beams] = logits[beams].log_softmax(dim=-1)  # before the penalties, as in transformers
        allowed, without_mask = NO_MASKS if masks is None else masks.wait()
        adjust_logits(logits, sequences, lengths, self.eos_token_ids, allowed)
        greatest, tokens = logits.max(dim=-1)  # of equal logits the one with the lowest id, as in transformers
        failed = {**failures(greatest), **without_mask}
        drawn = [row for row, s in enumerate(sequences) if not s.params.is_greedy and row not in failed]
        for rows in _parts(drawn, logits):
            # A single row as a slice, which does not copy.
            index = slice(rows[0], rows[0] + 1) if len(rows) == 1 else rows
            tokens[index] = _draw(logits[index], [sequences[row] for row in rows], lengths[rows])
        token_ids = tokens.cpu().numpy().astype(np.int32)
        found = [] if raw is None else find_logprobs(raw, tokens[list(counts)], counts)
        logprobs = logprobs_by_row([group.moved(torch.Tensor.cpu) for group in found], failed=failed)
        candidates = {row: _likeliest(logits[row], sequences[row]) for row in beams if row not in failed}
        return StepResult(token_ids, logprobs, failed, candidates)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Meanwhile torch's operators in this thread compute alone, which takes a microsecond to arrange.

    A draw has dozens of short operators, at whose ends torch's threads wait for each other: for 32 rows of 49,152
    logits two idle processors save a fifth of 9 ms, and two that others use as well make it 600 ms.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _likeliest(logprobs: torch.Tensor, sequence: Sequence) -> Candidates:
    """The best candidates from one beam's logprobs [V]."""
    count = num_candidates(sequence.params, len(sequence.stop_ids))
    best = logprobs.topk(min(count, len(logprobs)))
    return Candidates(best.indices.cpu().numpy().astype(np.int32), best.values.cpu().numpy())


def _parts(rows: list[int], logits: torch.Tensor) -> Iterator[list[int]]:
    """The rows in parts. On a CPU each is small enough to stay in the cache during the dozen operations of a draw."""
    size = max(1, _PART // logits.shape[1] if logits.device.type == "cpu" else len(rows))
    return (rows[start : start + size] for start in range(0, len(rows), size))


def failures(greatest: torch.Tensor) -> dict[int, str]:
    """Rows that cannot be sampled, by their greatest logit [R]: a NaN anywhere in a row is its greatest."""
    values = greatest.cpu().numpy()  # for so few numbers, torch's operators take three times as long
    if np.isfinite(values).all():
        return {}
    return {int(row): _reason(float(values[row])) for row in np.flatnonzero(~np.isfinite(values))}


def _reason(greatest: float) -> str:
    if greatest == -np.inf:
        return "no token can be chosen: every logit is minus infinity"
    return f"the model's logits are not finite (the greatest is {greatest})"


def _draw(logits: torch.Tensor, sequences: list[Sequence], lengths: Int32) -> torch.Tensor:
    """Tokens int64 [R] of rows with a temperature, by the random number of (seed, index of the new token)."""
    numbers = uniforms([s.seed for s in sequences], lengths)
    filters = _filters([s.params for s in sequences], vocab_size=logits.shape[1], device=logits.device)
    return draw(logits, filters, torch.from_numpy(numbers).to(logits.device)[:, None])


def _filters(params: list[SamplingParams], *, vocab_size: int, device: torch.device) -> Filters:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    return Filters(
        temperature=column([p.temperature for p in params], torch.float32),
        top_k=column([top_k_of(p, vocab_size) for p in params], torch.int64),
        top_p=column([p.top_p for p in params], torch.float64),
        min_p=column([p.min_p for p in params], torch.float32),
    )
