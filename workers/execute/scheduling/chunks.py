"""How a prompt is cut, and how what was said after it is computed once more.

A kernel may round differently for another number of rows, so a sequence that is computed again goes on exactly as if
nothing had happened only if every number is made as it was the first time: the prompt in the same chunks, its output
token by token among the decodes. Such a sequence *replays*.
"""

from __future__ import annotations

from .sequence import Sequence, SequenceState


def next_chunk(sequence: Sequence, *, max_tokens: int) -> int:
    """Tokens of the next chunk, where the budgets allow it."""
    computed = sequence.num_computed_tokens
    if is_repeated(sequence):
        ends = [end for end in sequence.chunk_ends if end > computed]
        if ends:
            return ends[0] - computed
    return min(sequence.num_prefill_tokens - computed, max_tokens)


def is_repeated(sequence: Sequence) -> bool:
    """Whether its chunks must be those of the first time."""
    return sequence.replays and sequence.num_output_tokens > 0


def state_at_start(sequence: Sequence) -> SequenceState:
    """Ready if all that is to be prefilled was found in the cache; who replays nothing has always a token left."""
    is_swapped = sequence.state is SequenceState.SWAPPED  # comes back with what it had computed, cut as it was
    if sequence.num_output_tokens == 0 and not is_swapped:
        sequence.chunk_ends = [sequence.num_computed_tokens] if sequence.num_computed_tokens else []
    is_known = sequence.num_computed_tokens >= sequence.num_prefill_tokens
    return SequenceState.READY if is_known else SequenceState.PREFILLING


def note_chunk(sequence: Sequence) -> None:
    """A chunk was computed. The first time it is remembered; after the last one of a repetition the replay begins."""
    if sequence.num_output_tokens == 0:
        sequence.chunk_ends.append(sequence.num_computed_tokens)
    elif sequence.num_prefill_tokens <= sequence.num_computed_tokens < sequence.num_tokens:
        sequence.state = SequenceState.READY
