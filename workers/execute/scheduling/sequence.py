"""One token stream: its tokens, its pages, and its state."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ....protocol.arrays import Float64, Int32
from ....protocol.record_key import Key as Key
from ....protocol.sampling import SamplingParams
from .pooling import LAST_STATE, Pooling
from .prefix import PageNode

if TYPE_CHECKING:
    from .groups import Group
    from .shared_prompts import Leader
    from .states import StateRows

UNKNOWN_CHANCE = 0.5


class SequenceState(Enum):
    """Where a sequence is between arrival and end; see ``Roster`` for how it moves on."""

    WAITING = "waiting"  # no pages, nothing computed (new, or preempted)
    SWAPPED = "swapped"  # waiting, with computed tokens on host pages
    PREFILLING = "prefilling"  # some chunks computed
    PAUSED = "paused"  # a beam that has taken its step, until the others of its search have
    READY = "ready"  # prompt computed, first token sampled, no row yet
    DECODING = "decoding"  # holds a row
    ENDING = "ending"  # its last token is being computed
    FINISHED = "finished"  # row given back, pages in limbo until released


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in execute. ``tokens[:num_tokens]`` are the prompt and the tokens sampled so far.

    Invariant: the keys and values of ``tokens[:num_computed_tokens]`` are in the pages of ``block_table``, and
    ``len(block_table) == ceil(tokens with a place / page_size)``. Its first ``tip.depth`` pages are full and may be in
    other tables too; they are never written to.
    """

    key: Key
    tokens: Int32  # [prompt + capacity for output], allocated once
    num_prompt_tokens: int
    num_tokens: int  # prompt and output; a recovered sequence starts with output
    params: SamplingParams
    seed: int
    arrival: int  # order of acceptance, kept over preemption and recovery
    stop_ids: frozenset[int] = frozenset()  # end of sequence (unless ignore_eos) and stop_token_ids
    group_key: Key | None = None  # of its request, if that has several sequences, which have the same prompt
    group: Group | None = None  # while it is live
    accepted_at: int = 0  # when the service took it, ns of the engine's clock; not used in decisions
    final_ids: frozenset[int] = frozenset()  # end of sequence under a grammar: applies even before min_tokens
    grammar: object | None = None  # determines which tokens may follow, see execute/grammar; None: all
    token_counts: object | None = None  # for its penalties, see sampling/token_counts
    cache_salt: str = ""  # prefixes are shared only among sequences with the same salt; each adapter has its own
    adapter: int = 0  # used to compute it, counted from 1; 0: none
    deadline_at: int = 0  # ns of the engine's clock by which it must have ended; 0: none
    queue_deadline_at: int = 0  # by which it must have begun
    priority: int = 0  # the lowest goes first, see policy.Priority
    replays: bool = False  # if recomputed, its output is decoded token by token, as it was the first time
    chunk_ends: list[int] = field(default_factory=list)  # of the prompt, as divided the first time
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of these, found in the cache when it first started
    num_scored_tokens: int = 0  # leading prompt tokens whose successor has its logprob, if these are requested
    embedding_size: int = 0  # values of the embedding that is still to be made of its prompt; 0: none is
    pooling: Pooling = LAST_STATE  # of that embedding
    num_pooled_tokens: int = 0  # leading prompt tokens whose states are in ``pooled``, if all of them are needed
    pooled: Float64 | None = None  # [embedding_size], the sum of the states so far, see ``pooling.pool``
    block_table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)  # host pages, while it is swapped out
    shares_tail: bool = False  # its half-full last page may be in other tables too, and is copied before it grows
    tip: PageNode | None = None  # the node of its last shareable page
    state: SequenceState = SequenceState.WAITING
    state_rows: StateRows | None = None  # of its recurrent state, while it runs on a model that has one
    row: int | None = None  # index into the decode buffers, 0..max_num_seqs-1
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    num_preemptions: int = 0
    leader: Leader | None = None  # while it waits: whose prompt it follows, see shared_prompts
    num_overtaken: int = 0  # sequences behind it that started while it did not fit
    chance: float = UNKNOWN_CHANCE  # recent estimate that a proposed token is right; 0: nothing is ever proposed
    last_step: int = 0  # number of the last step that reads or writes its pages

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_tokens(self) -> int:
        """Output tokens this sequence may have; prepare has limited it to the context."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that are computed in chunks; the others are decoded."""
        return self.num_prompt_tokens if self.replays else self.num_tokens

    @property
    def is_scored(self) -> bool:
        """Whether no more logprobs of its prompt are needed. They are made once, even if it is recomputed."""
        return self.params.prompt_logprobs is None or self.num_scored_tokens >= self.num_prompt_tokens - 1

    def unscored_rows(self, start: int, num_tokens: int) -> range:
        """Positions in this chunk whose logits are needed to score the next prompt token."""
        if self.is_scored:
            return range(0)
        return range(max(start, self.num_scored_tokens), min(start + num_tokens, self.num_prompt_tokens - 1))

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens that need not be computed if their keys and values are cached: they have no other use."""
        if self.is_pooled:
            return self.num_tokens - 1 if self.is_scored else self.num_scored_tokens
        return self.num_pooled_tokens

    @property
    def is_pooled(self) -> bool:
        """Whether its embedding, if it wants one, needs no states of earlier tokens than the last any more."""
        return not (self.embedding_size and self.pooling.takes_all)

    def unpooled_rows(self, start: int, num_tokens: int) -> range:
        """Positions in this chunk whose hidden states are needed for its embedding."""
        if not self.embedding_size:
            return range(0)
        return self.pooling.rows(self.num_tokens, self.num_pooled_tokens, range(start, start + num_tokens))

    def note_computed(self, num_tokens: int) -> None:
        """So many leading tokens have been computed, now or earlier, with whatever else is needed of them."""
        if not self.is_scored:
            self.num_scored_tokens = max(self.num_scored_tokens, num_tokens)
        if not self.is_pooled:
            self.num_pooled_tokens = max(self.num_pooled_tokens, num_tokens)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether more is needed of its prompt than keys and values, so that those in the cache save it little."""
        return not (self.is_scored and self.is_pooled)

    @property
    def output_tokens(self) -> Int32:
        """int32 [num_output_tokens], a view."""
        return self.tokens[self.num_prompt_tokens : self.num_tokens]

    @property
    def needs_its_tokens(self) -> bool:
        """Whether the host must know each token before the next one can be computed."""
        p = self.params
        has_penalties = p.repetition_penalty != 1.0 or bool(p.presence_penalty or p.frequency_penalty)
        return self.is_beam or has_penalties or self.grammar is not None

    @property
    def is_beam(self) -> bool:
        """Whether its next token is chosen jointly with those of other sequences, once all of them are known."""
        return self.params.is_beam_search

    @property
    def is_complete(self) -> bool:
        """Whether its prompt is computed, and only that was requested: for its logprobs, or its embedding."""
        return self.max_tokens == 0 and self.num_uncomputed_tokens == 0

    def is_full(self, max_model_len: int) -> bool:
        """Whether there is no room for another token."""
        return self.num_tokens >= min(len(self.tokens), max_model_len)

    def append(self, token_id: int) -> None:
        """Add a token sampled after the last one."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def end_reason(self, max_model_len: int) -> str | None:
        """Why no token may follow the last one ("stop" or "length"); None if one may."""
        num_output_tokens = self.num_tokens - self.num_prompt_tokens
        may_stop = self.stop_ids and num_output_tokens >= max(1, self.params.min_tokens)
        if may_stop and int(self.tokens[self.num_tokens - 1]) in self.stop_ids:
            return "stop"
        if self.final_ids and int(self.tokens[self.num_tokens - 1]) in self.final_ids:
            return "stop"
        return "length" if self.is_full(max_model_len) else None


def num_common(first: Sequence, second: Sequence, limit: int) -> int:
    """How many of the first ``limit`` tokens are the same."""
    differs = first.tokens[:limit] != second.tokens[:limit]
    return int(differs.argmax()) if differs.any() else limit
