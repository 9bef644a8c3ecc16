"""How a prompt is divided into chunks, and how output is recomputed after it.

A kernel may round differently for a different number of rows. So a recomputed sequence continues exactly as before only
if every value is computed as it was the first time: the prompt in the same chunks, the output token by token among the
decodes. Such a sequence *replays*.
"""

from __future__ import annotations

from .sequence import Sequence, SequenceState


def next_chunk(sequence: Sequence, *, max_tokens: int) -> int:
    """Tokens of the next chunk, if the budgets allow it."""
    computed = sequence.num_computed_tokens
    if is_repeated(sequence):
        ends = [end for end in sequence.chunk_ends if end > computed]
        if ends:
            return ends[0] - computed
    return min(sequence.num_prefill_tokens - computed, max_tokens)


def is_repeated(sequence: Sequence) -> bool:
    """Whether its chunks must be the same as the first time."""
    return sequence.replays and sequence.num_output_tokens > 0


def state_at_start(sequence: Sequence) -> SequenceState:
    """Ready if all prefill tokens were found in the cache; a sequence that does not replay has at least one left."""
    is_swapped = sequence.state is SequenceState.SWAPPED  # its computed tokens return with their chunks
    if sequence.num_output_tokens == 0 and not is_swapped:
        sequence.chunk_ends = [sequence.num_computed_tokens] if sequence.num_computed_tokens else []
    is_known = sequence.num_computed_tokens >= sequence.num_prefill_tokens
    return SequenceState.READY if is_known else SequenceState.PREFILLING


def note_chunk(sequence: Sequence) -> None:
    """Record a computed chunk the first time; after the last chunk of a repetition the replay of the output begins."""
    if sequence.num_output_tokens == 0:
        sequence.chunk_ends.append(sequence.num_computed_tokens)
    elif sequence.num_prefill_tokens <= sequence.num_computed_tokens < sequence.num_tokens:
        sequence.state = SequenceState.READY
